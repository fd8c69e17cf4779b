"""The bytes that each layout sends, against those on record.

`PYTHONPATH=tests:tests/mesh python tests/mesh/test_bytes.py` writes the record,
tests/data/exchanges.json, anew: a change of it is to be seen in review.
"""

import json
import pathlib
import re
import sys

import jax
import numpy as np
import pytest
from helpers import mesh_of, more
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_on_mesh import LAYOUTS, make, placed, traffic

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


RECORD = pathlib.Path(__file__).parents[1] / "data" / "exchanges.json"


def bytes_of(layout, is_known):
    """Bytes in each kind of collective of an update, by the program for 8 devices."""
    mesh, shardings, params, grads = placed(layout)
    tx = make(shardings=shardings if is_known else None)
    with jax.set_mesh(mesh):
        program = jax.jit(tx.update).lower(grads, tx.init(params), params).compile()
    return {kind: int(found.bytes) for kind, found in sorted(traffic(program).items())}


def record():
    return {
        layout: {
            "shardings given": bytes_of(layout, True),
            "nothing said": bytes_of(layout, False),
        }
        for layout in LAYOUTS
    }


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_sends_no_more_than_on_record(layout):
    known = json.loads(RECORD.read_text())[layout]
    assert bytes_of(layout, True) == known["shardings given"]
    # How blocks are sent otherwise is up to XLA, whose versions differ.
    left_open = sum(bytes_of(layout, False).values())
    assert left_open <= 1.25 * sum(known["nothing said"].values())
    assert left_open > 0


def sent(axes, shape, spec, sizes):
    """Bytes that one device sends in an update of one leaf."""
    mesh = mesh_of(**sizes)
    sharding = NamedSharding(mesh, spec)
    tx = mc.scale_by_muon(dimension_numbers={"w": axes}, shardings={"w": sharding})
    w = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}
    state = jax.eval_shape(tx.init, w)
    state = state._replace(mu=w)
    found = traffic(jax.jit(tx.update).lower(w, state).compile())
    return sum(x.bytes for x in found.values())


def traced(axis, leaves, told, orthogonalizer):
    """An update on 8 devices along one axis; nothing is computed."""
    mesh = mesh_of(**{axis: 8})
    w = {
        name: jax.ShapeDtypeStruct(x, np.float32, sharding=NamedSharding(mesh, spec))
        for name, (x, spec) in leaves.items()
    }
    tx = mc.scale_by_muon(
        dimension_numbers=mc.MuonDimensionNumbers(-2, -1),
        orthogonalizer=orthogonalizer,
        shardings={name: x.sharding for name, x in w.items()} if told else None,
    )
    state = jax.eval_shape(tx.init, w)._replace(mu=w)
    with jax.set_mesh(mesh):
        return jax.jit(tx.update).trace(w, state)


FSDP = P(None, "fsdp")
#: Of the second each device has a matrix, but not of one shape.
FEW = {
    "one stack": {"w": ((8, 16, 32), FSDP)},
    "two": {"up": ((3, 16, 24), FSDP), "down": ((5, 8, 16), FSDP)},
}
ONE_STEP = mc.NewtonSchulz(steps=1)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_blocks_go_to_their_owners_and_back(name, told):
    """Each device sends all others a block of their matrices, and is sent as much."""
    program = traced("fsdp", FEW[name], told, ONE_STEP).lower().compile()
    found = traffic(program)
    if not told:
        # Each stack is sent by itself, by XLA, whose versions differ.
        entries = {"one stack": 16 * 32, "two": 16 * 24 + 8 * 16}[name]
        assert 0 < sum(x.bytes for x in found.values()) <= 1.25 * 2 * 4 * entries
        return
    # Parcels of two stacks are as large as the largest matrix.
    entries = {"one stack": 16 * 32, "two": 16 * 24}[name]
    (sent,) = found.values()
    assert (sent.count, sent.bytes) == (2, 2 * 4 * entries)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_blocks_are_sent_in_the_dtype_of_the_iteration(name, told):
    """In bfloat16 on an accelerator: float16, on a GPU, may overflow before a norm.

    Where only the compiler knows what is sent, it is told how that is to be sharded.
    """
    kind = "all_to_all" if told else "sharding_constraint"

    def sent(orthogonalizer, platforms=("cpu", "tpu", "cuda")):
        of_all = traced("fsdp", FEW[name], told, orthogonalizer)
        found = []
        for platform in platforms:
            text = of_all.lower(lowering_platforms=(platform,)).as_text()
            lines = [line for line in text.splitlines() if kind in line]
            assert len(lines) >= (2 if told else 1)
            found.append({re.findall(r"x([a-z]+\d+)>", line)[-1] for line in lines})
        return found

    assert sent(ONE_STEP) == [{"f32"}, {"bf16"}, {"bf16"}]
    # A function of the user's may need every bit.
    assert sent(lambda stack: stack, ["tpu"]) == [{"f32"}]


def of_experts(told):
    """Bytes by kind of an update of layers of experts, cut along the experts alone."""
    leaves = {
        "gate": ((16, 24, 8), P("expert")),
        "layers": ((3, 8, 8, 24), P(None, "expert")),
        "of_layers": ((8, 3, 8, 24), P("expert")),
    }
    return traffic(traced("expert", leaves, told, ONE_STEP).lower().compile())


@pytest.mark.parametrize("told", [more(True), False])
def test_experts_stay_where_they_are(told):
    """Also where only the compiler knows that devices have whole ones."""
    assert not of_experts(told)


@pytest.mark.more
def test_heads_that_tensor_parallelism_cuts_are_not_exchanged():
    """Every device has whole heads: nothing is sent, with FSDP its part alone."""
    flat, heads = (32, 64), (32, 8, 8)
    apart = mc.MatrixAxes(0, 1, head_dim=8)
    tensor = {"fsdp": 1, "tensor": 8}
    assert sent(apart, flat, P(None, "tensor"), tensor) == 0
    assert sent(mc.MatrixAxes(0, 1), flat, P(None, "tensor"), tensor) > 0
    # A flat kernel is cut as one whose heads have an axis.
    both = {"fsdp": 4, "tensor": 2}
    of_axis = sent(mc.MuonDimensionNumbers(0, 2), heads, P("fsdp", "tensor"), both)
    assert sent(apart, flat, P("fsdp", "tensor"), both) == of_axis
    # There and back: a device's block of 8 x 32 numbers.
    assert 0 < of_axis <= 2 * 4 * 8 * 32
    # An interleaved kernel has query, key and value of a head side by side.
    fused = mc.MatrixAxes(0, 1, parts=(4, 4, 4), head_dim=4, groups=8)
    assert sent(fused, (32, 96), P(None, "tensor"), tensor) == 0


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")
    sys.exit()

"""The bytes that each layout sends, against those on record.

`PYTHONPATH=tests:tests/mesh python tests/mesh/test_bytes.py` writes the record,
tests/data/exchanges.json, anew: a change of it is to be seen in review.
"""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from helpers import more
from jax.sharding import AxisType, NamedSharding
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
    names = tuple(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), names, axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, spec)
    tx = mc.scale_by_muon(dimension_numbers={"w": axes}, shardings={"w": sharding})
    w = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}
    state = jax.eval_shape(tx.init, w)
    state = state._replace(mu=w)
    found = traffic(jax.jit(tx.update).lower(w, state).compile())
    return sum(x.bytes for x in found.values())


def of_experts(told):
    """Bytes by kind of an update of layers of experts, cut along the experts alone."""
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    specs = {
        "gate": ((16, 24, 8), P("expert")),
        "layers": ((3, 8, 8, 24), P(None, "expert")),
        "of_layers": ((8, 3, 8, 24), P("expert")),
    }
    w = {
        name: jax.ShapeDtypeStruct(x, np.float32, sharding=NamedSharding(mesh, spec))
        for name, (x, spec) in specs.items()
    }
    tx = mc.scale_by_muon(
        dimension_numbers=mc.MuonDimensionNumbers(-2, -1),
        orthogonalizer=mc.NewtonSchulz(steps=1),
        shardings={name: x.sharding for name, x in w.items()} if told else None,
    )
    state = jax.eval_shape(tx.init, w)._replace(mu=w)
    with jax.set_mesh(mesh):
        return traffic(jax.jit(tx.update).lower(w, state).compile())


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

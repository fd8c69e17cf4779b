"""`init` and `update` are pure: of their arguments alone, and of nothing seen before.

A step returns the state sharded as `init` made it; the program of an update follows
from the optimizer and the arguments, whatever other params it has seen.
"""

import functools
import hashlib
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from helpers import few, mesh_of, normal, script_environment
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import abstract, is_shape

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

HEADS = 4
SHAPES = {
    "attn": {
        "query": {"kernel": (8, HEADS, 4), "bias": (HEADS, 4)},
        "key": {"kernel": (8, HEADS, 4)},
        "out": {"kernel": (HEADS, 4, 8)},
    },
    "mlp": {"up": {"kernel": (8, 16), "bias": (16,)}, "down": {"kernel": (16, 8)}},
}


def shapes(stack=()):
    return jax.tree.map(lambda x: (*stack, *x), SHAPES, is_leaf=is_shape)


def tree(seed, stack=()):
    leaves, treedef = jax.tree.flatten(shapes(stack), is_leaf=is_shape)
    return treedef.unflatten(normal((seed, i), *s) for i, s in enumerate(leaves))


def layout(heads, rows, stack=()):
    """Specs: of heads and of the hidden axis, of the features, of a stack in front."""
    return {
        "attn": {
            "query": {"kernel": P(*stack, rows, heads), "bias": P(*stack, heads)},
            "key": {"kernel": P(*stack, rows, heads)},
            "out": {"kernel": P(*stack, heads, None, rows)},
        },
        "mlp": {
            "up": {"kernel": P(*stack, rows, heads), "bias": P(*stack, heads)},
            "down": {"kernel": P(*stack, heads, rows)},
        },
    }


LAYOUTS = {
    "data parallel": ({"data": 8}, layout(None, None), ()),
    "FSDP": ({"fsdp": 8}, layout(None, "fsdp"), ()),
    "FSDP x tensor": ({"fsdp": 4, "tensor": 2}, layout("tensor", "fsdp"), ()),
    "a stack": ({"layers": 2, "tensor": 4}, layout("tensor", None, ("layers",)), (2,)),
}


def stats_of(params):
    *stack, _, _, _ = params["attn"]["query"]["kernel"].shape
    row = np.linspace(50, 300, HEADS, dtype=np.float32)
    return {"attn": {"max_logits": np.broadcast_to(row, (*stack, HEADS))}}


OPTIONS = {"orthogonalizer": mc.NewtonSchulz(steps=2)}


def moved(before, after):
    """The paths of what is sharded otherwise."""
    return [
        f"{jax.tree_util.keystr(path)}: {x.sharding} became {y.sharding}"
        for (path, x), y in zip(
            jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
        if not x.sharding.is_equivalent_to(y.sharding, x.ndim)
    ]


#: Leaves that share a stack, each cut where the other is not.
CUT_APART = {
    "layers against rows and columns": (((2, 8, 8), P("c")), ((8, 8), P("a", "b"))),
    "rows against both": (((8, 8), P("c")), ((8, 8), P("a", "b"))),
    "two axes against three": (
        ((8, 4, 4), P(("b", "a"))),
        ((2, 4, 4), P("a", "b", "c")),
    ),
}


@pytest.mark.parametrize("name", CUT_APART)
def test_the_state_of_one_leaf_takes_no_cut_of_another(name):
    mesh = mesh_of(a=2, b=2, c=2)
    params = {
        f"w{i}": jax.device_put(normal(i, *shape), NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(CUT_APART[name])
    }
    matrices = optax.contrib.MuonDimensionNumbers(-2, -1)
    tx = mc.muon(1e-2, **OPTIONS, dimension_numbers={"*": matrices})
    with jax.set_mesh(mesh):
        state = tx.init(params)
        _, after = jax.jit(tx.update)(params, state, params)
    assert not moved(state, after)


# Programs


def program(tx, params, state, mesh):
    """The text of an update, without what `init` returned."""

    def update(grads, state, params):
        return tx.update(grads, state, params, attention_stats=stats_of(params))

    with jax.set_mesh(mesh):
        return jax.jit(update).lower(params, state, params).as_text()


def placed(mesh, specs, stack=()):
    """Abstract params on a mesh."""

    def put(x, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(put, abstract(shapes(stack)), specs)


def made(name, kind, is_told, seen=()):
    """The program of one layout, after `init` and updates of others."""
    sizes, specs, stack = LAYOUTS[name]
    mesh = mesh_of(kind, **sizes)
    tx = mc.muonclip(1e-2, **OPTIONS, shardings=specs if is_told else None)
    params = placed(mesh, specs, stack)
    # The state without `init`: by another optimizer's, as a restored one is.
    with jax.set_mesh(mesh):
        other = mc.muonclip(1e-2, **OPTIONS)
        state = jax.eval_shape(other.init, params)
        for x in seen:
            tx.update(x, tx.init(x), x, attention_stats=stats_of(x))
    return program(tx, params, state, mesh)


CASES = [
    ("FSDP x tensor", AxisType.Auto, False),
    ("FSDP x tensor", AxisType.Auto, True),
    ("data parallel", AxisType.Explicit, False),
]


@functools.cache
def digest(number):
    return hashlib.sha256(made(*CASES[number]).encode()).hexdigest()


@pytest.mark.more
@pytest.mark.parametrize("number", few(range(len(CASES)), 1))
def test_an_update_remembers_no_params(number):
    """Nor their shardings: of other shapes, on other meshes, on one device."""
    name, kind, is_told = CASES[number]
    seen = [tree(1)]
    if not is_told:
        seen.append(tree(2, (3,)))
        mesh = mesh_of(kind, **LAYOUTS[name][0])
        for axis in mesh.axis_names:
            seen.append(jax.device_put(tree(3, (16,)), NamedSharding(mesh, P(axis))))
    before = made(name, kind, is_told)
    assert made(name, kind, is_told, seen) == before
    # A witness: a program does depend on what it is given.
    assert made("FSDP", kind, is_told) != before


@pytest.mark.more
def test_a_fresh_process_makes_the_same_programs():
    script = (
        "import test_pure\n"
        "for i in range(len(test_pure.CASES)):\n"
        "    print(test_pure.digest(i))"
    )
    paths = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    paths.append(os.environ.get("PYTHONPATH", ""))
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=script_environment() | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert found.stdout.split() == [digest(i) for i in range(len(CASES))]

"""Muon on a mesh against Muon on one device: the same numbers, compiled once."""

import functools

import chex
import jax
import numpy as np
import pytest
from helpers import few, more
from hlo_costs import hlo_costs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
IN = MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
# Three shapes: gate and down have one, but a mesh cuts them along different sides.
SHAPES = {
    "gate": (6, 16, 64),
    "down": (6, 64, 16),
    "query": (16, 8, 4),
    "experts": (3, 8, 8, 16),
}
NUMBERS = {name: IN if name == "query" else PLAIN for name in SHAPES}
LAYOUTS = {
    "fsdp": (
        {"fsdp": 8},
        {
            "gate": P(None, "fsdp"),
            "down": P(None, "fsdp"),
            "query": P("fsdp"),
            "experts": P(None, None, None, "fsdp"),
        },
    ),
    "fsdp and tensor": (
        {"fsdp": 4, "tensor": 2},
        {
            "gate": P(None, "fsdp", "tensor"),
            "down": P(None, ("tensor", "fsdp")),
            "query": P("fsdp", "tensor"),
            "experts": P(None, "tensor", "fsdp"),
        },
    ),
    "expert": (
        {"expert": 4, "fsdp": 2},
        {
            "gate": P(None, ("expert", "fsdp")),
            "down": P(None, "fsdp", "expert"),
            "query": P("fsdp"),
            "experts": P(None, "expert", "fsdp"),
        },
    ),
    "data": ({"data": 8}, {name: P() for name in SHAPES}),
    "stack": (
        {"data": 4, "layer": 2},
        {"gate": P("layer"), "down": P("layer", "data"), "query": P(), "experts": P()},
    ),
}
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}

# Two steps compile faster than five.
make = functools.partial(
    mc.muon, 1e-2, dimension_numbers=NUMBERS, orthogonalizer=mc.NewtonSchulz(steps=2)
)


def random_tree(seed):
    generator = np.random.default_rng(seed)
    # Leaves of other scales, so that one taken for another is seen.
    return {
        name: (scale * generator.normal(size=shape)).astype(np.float32)
        for scale, (name, shape) in zip([1, 30, 1e-3, 7], SHAPES.items(), strict=True)
    }


def momentum_of(state):
    is_muon = lambda x: isinstance(x, mc.ScaleByMuonState)  # noqa: E731
    (found,) = filter(is_muon, jax.tree.leaves(state, is_leaf=is_muon))
    return found.mu


def two_steps(tx, grads, params, jit=jax.jit):
    """The second update, and the momentum after it."""
    state, update = tx.init(params), jit(tx.update)
    _, state = update(grads, state, params)
    updates, state = update(grads, state, params)
    return updates, momentum_of(state)


@functools.cache
def on_one_device():
    return two_steps(make(), random_tree(1), random_tree(0))


def placed(layout, types="auto"):
    axes, specs = LAYOUTS[layout]
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(TYPES[types],) * len(axes)
    )
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params, grads = jax.device_put((random_tree(0), random_tree(1)), (shardings,) * 2)
    return mesh, shardings, params, grads


def assert_as_on_one_device(results):
    chex.assert_trees_all_close(results, on_one_device(), rtol=1e-5, atol=1e-7)


def assert_where(tree, shardings):
    for name, sharding in shardings.items():
        assert tree[name].sharding.is_equivalent_to(sharding, tree[name].ndim), name


@pytest.mark.parametrize("layout", few(LAYOUTS, "expert"))
@pytest.mark.parametrize(
    ("types", "told"), [more("auto", True), ("auto", False), more("explicit", False)]
)
def test_same_as_on_one_device(layout, types, told):
    _, shardings, params, grads = placed(layout, types)
    results = two_steps(make(shardings=shardings if told else None), grads, params)
    assert_as_on_one_device(results)
    for tree in results:
        assert_where(tree, shardings)


def test_pmap_without_a_name_of_the_axis():
    """Every device updates what it sees."""
    tx, (grads, params) = make(), map(random_tree, (1, 0))
    arguments = grads, tx.init(params), params
    repeated = jax.tree.map(lambda x: np.stack([x] * 8), arguments)
    results, _ = jax.pmap(tx.update, axis_name="data")(*repeated)
    expected, _ = tx.update(*arguments)
    for device in (0, 7):
        found = jax.tree.map(lambda x, i=device: x[i], results)
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)


def traffic(compiled):
    # Loops over a device's share run once or so; what they hold is what counts.
    trips = {f"stack{i}": 1 for i in range(8)}
    return hlo_costs(compiled.as_text(), trips).collectives


def test_a_parameter_on_another_mesh():
    _, shardings, params, _ = placed("fsdp")
    other = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    moved = shardings | {"query": NamedSharding(other, P("tensor"))}
    # As it is, and as it would have to be.
    with pytest.raises(
        ValueError,
        match=r"P\('tensor',?\) on mesh\(fsdp: 4, tensor: 2\) for 'query'.*"
        r"P\('fsdp',?\) on mesh\(fsdp: 8\)",
    ):
        make(shardings=moved).init(params)
    shapes = jax.eval_shape(lambda: params)
    with pytest.raises(ValueError, match="'down' and 'query' are on different meshes"):
        make(shardings=moved).init(shapes)


def test_explicit_axes_that_contradict_the_shardings():
    _, shardings, params, grads = placed("fsdp", "explicit")
    wrong = shardings | {
        "gate": NamedSharding(shardings["gate"].mesh, P(None, None, "fsdp"))
    }
    with pytest.raises(ValueError, match="for 'gate', which is on"):
        jax.jit(make(shardings=wrong).update)(grads, make().init(params), params)

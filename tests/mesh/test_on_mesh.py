"""Muon on a mesh against Muon on one device: the same numbers, compiled once."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_where,
    few,
    leaf_pairs,
    matrix_of,
    mesh_of,
    more,
    normal,
    on_mesh,
    polynomial_of,
    step_of,
    updates_of,
)
from hlo_costs import hlo_costs
from internals import (
    matrix_view,
    MatrixLeaf,
    orthogonalize_on_mesh,
    platform_with,
    solver,
)
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


def two_steps(tx, grads, params):
    """The second update, and the momentum after it."""
    updates, state = updates_of(tx, [grads] * 2, params)
    return updates, momentum_of(state)


@functools.cache
def on_one_device():
    return two_steps(make(), random_tree(1), random_tree(0))


def placed(layout, types="auto"):
    axes, specs = LAYOUTS[layout]
    mesh = mesh_of(TYPES[types], **axes)
    shardings = on_mesh(mesh, specs)
    params, grads = jax.device_put((random_tree(0), random_tree(1)), (shardings,) * 2)
    return mesh, shardings, params, grads


def assert_as_on_one_device(results):
    chex.assert_trees_all_close(results, on_one_device(), rtol=1e-5, atol=1e-7)


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
    moved = shardings | on_mesh(mesh_of(fsdp=4, tensor=2), {"query": P("tensor")})
    # As it is, and as it would have to be.
    match = (
        r"P\('tensor',?\) on mesh\(fsdp: 4, tensor: 2\) for 'query'.*"
        r"P\('fsdp',?\) on mesh\(fsdp: 8\)"
    )
    with pytest.raises(ValueError, match=match):
        make(shardings=moved).init(params)
    shapes = jax.eval_shape(lambda: params)
    with pytest.raises(ValueError, match="'down' and 'query' are on different meshes"):
        make(shardings=moved).init(shapes)


def test_explicit_axes_that_contradict_the_shardings():
    _, shardings, params, grads = placed("fsdp", "explicit")
    mesh = shardings["gate"].mesh
    wrong = shardings | on_mesh(mesh, {"gate": P(None, None, "fsdp")})
    with pytest.raises(ValueError, match="for 'gate', which is on"):
        jax.jit(make(shardings=wrong).update)(grads, make().init(params), params)


# One matrix, and two stacks that devices divide evenly, together.
UNPLACED_SHAPES = {"kernel": (16, 8), "gate": (8, 6, 4), "up": (8, 6, 4)}
UNPLACED = {
    name: normal(i, *shape) for i, (name, shape) in enumerate(UNPLACED_SHAPES.items())
}
muon = functools.partial(
    mc.muon,
    1e-1,
    dimension_numbers={"*": MuonDimensionNumbers(-2, -1)},
    orthogonalizer=mc.NewtonSchulz(steps=2),  # where they run is the question
)
OPTIMIZERS = {
    "plain": muon(),
    "neurons": muon(neuron_b2=0.95),
    "8 bits": muon(mu_dtype="int8"),
}


def after_two_steps(tx, params, state):
    for _ in range(2):
        params, state = step_of(tx)(params, state, params)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("init_inside", [more(False), True])
def test_update_is_that_without_a_mesh(name, init_inside):
    tx = OPTIMIZERS[name]
    before = tx.init(UNPLACED)
    expected = jax.jit(functools.partial(after_two_steps, tx))(UNPLACED, before)

    @jax.jit
    def step(params, state):
        return after_two_steps(tx, params, tx.init(params) if init_inside else state)

    with jax.set_mesh(mesh_of(data=8)):
        found = step(UNPLACED, before)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.more
def test_derivative_through_an_update():
    tx = muon()

    def loss(params):
        return jnp.sum(after_two_steps(tx, params, tx.init(params))["kernel"] ** 3)

    expected = jax.grad(loss)(UNPLACED)["kernel"]
    with jax.set_mesh(mesh_of(data=8)):
        found = jax.jit(jax.grad(loss))(UNPLACED)["kernel"]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


WHOLE = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

# Shapes and specs of leaves.
BATCHES = {
    "as many for all": [((2, 4, 24, 8), P(None, "expert", "fsdp")),
         ((2, 4, 8, 24), P(None, "expert", "fsdp"))],
    "more for some": [((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((9, 2, 8, 24), P(None, "expert", "fsdp")),
         ((40, 8), P("fsdp")), ((8, 8), P(None, "expert"))],
    "few": [((3, 24, 8), P(None, ("expert", "fsdp"))),
         ((2, 8, 24), P(None, ("expert", "fsdp")))],
    "some more for some": [((11, 2, 24, 8), P(None, "expert", "fsdp")),
         ((13, 2, 24, 8), P(None, "expert", "fsdp")),
         ((21, 2, 8, 24), P(None, "expert", "fsdp"))],
    "copies": [((3, 24, 8), P(None, "fsdp")), ((2, 8, 24), P(None, "fsdp"))],
    "whole": [((11, 24, 8), P()), ((5, 24, 8), P())],
}  # fmt: skip


def leaf_of(shape, seed):
    *stack, m, n = shape
    values = np.linspace(1, 0.3, min(m, n))
    each = [matrix_of(values, m, n, seed + i) for i in range(int(np.prod(stack)))]
    return np.stack(each).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("platform", [more("cpu"), more("gpu"), "tpu"])
@pytest.mark.parametrize("batch", [more(1), 400, more(10**6)])
@pytest.mark.parametrize("name", few(BATCHES, "some more for some"))
def test_matrices_come_back_orthogonal(name, batch, platform):
    layout = BATCHES[name]
    mesh = mesh_of(expert=2, fsdp=4)
    leaves = [
        jax.device_put(leaf_of(shape, 10 * i), NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(layout)
    ]
    with platform_with(platform, batch_entries=batch):
        its = solver(platform, dtype="float32")
        route = jax.jit(functools.partial(orthogonalize_on_mesh, its, mesh=mesh))
        results = route(
            [
                MatrixLeaf(leaf, matrix_view(shape, WHOLE), spec)
                for leaf, (shape, spec) in zip(leaves, layout, strict=True)
            ]
        )
    for leaf, result in leaf_pairs(leaves, results):
        assert result.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        matrices = np.float64(leaf).reshape(-1, *leaf.shape[-2:])
        exact = [polynomial_of(x, mc.NS_COEFFS["keller"]) for x in matrices]
        actual = np.asarray(result).reshape(matrices.shape)
        np.testing.assert_allclose(actual, np.stack(exact), atol=5e-5)

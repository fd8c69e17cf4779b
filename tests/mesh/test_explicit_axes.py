"""Updates under `vmap` and differentiation, on explicit axes and in ensembles."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import first_update, leaf_pairs, mesh_of, more, normal, on_mesh, step_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

A, E = AxisType.Auto, AxisType.Explicit
SPECS = {"wide": P("a", "b"), "stack": P(None, "b", "a"), "tall": P(("a", "b"))}
SHAPES = {"wide": (8, 16), "stack": (3, 8, 8), "tall": (16, 4)}
PARAMS = {name: normal(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
SIZES = {"a": 4, "b": 2}


def make(shardings=None):
    numbers, steps = MuonDimensionNumbers(-2, -1), mc.NewtonSchulz(steps=2)
    options = dict(orthogonalizer=steps, dimension_numbers=numbers)
    return mc.muon(1.0, shardings=shardings, **options)


@pytest.mark.more
@pytest.mark.parametrize("spec", [P(None, "b"), more(P("a", "b"))])
def test_the_derivative_of_newton_schulz(spec):
    """In several batches: a matrix has more entries than a batch on CPU."""
    x = normal(0, 4, 160, 140)
    gradient = jax.grad(lambda x: jnp.sum(mc.newton_schulz(x, steps=2) ** 3))
    sharding = NamedSharding(mesh_of(E, **SIZES), spec)
    found = jax.jit(gradient)(jax.device_put(x, sharding))
    np.testing.assert_allclose(found, gradient(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [P("a", "b"), P(None, "a", "b"), P(("a", "b")), P("b", None, "a"), P(None, "a")],
)
@pytest.mark.parametrize("is_mapped", [more(False), True])
def test_newton_schulz_of_cut_matrices(spec, is_mapped):
    mesh, x = mesh_of(E, **SIZES), normal(0, 8, 4, 12).at[:, :, :8].get()
    function = jax.vmap(mc.newton_schulz) if is_mapped else mc.newton_schulz
    with jax.set_mesh(mesh):
        y = jax.jit(function)(jax.device_put(x, NamedSharding(mesh, spec)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    np.testing.assert_allclose(y, mc.newton_schulz(x), atol=1e-4)


def test_vmap_over_a_population():
    mesh, tx = mesh_of(E, **SIZES), make()
    population, spec = normal(0, 4, 8, 16), P(None, "a")
    expected = [first_update(tx, x, x) for x in population]
    with jax.set_mesh(mesh):
        x = jax.device_put(population, NamedSharding(mesh, spec))
        y = jax.jit(jax.vmap(lambda x: first_update(tx, x, x)))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    np.testing.assert_allclose(y, jnp.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P("b", None, "a")])
def test_vmap_over_what_an_explicit_axis_shards_is_refused(spec):
    mesh, tx = mesh_of(E, **SIZES), make()
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(0, 4, 8, 16), NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match="vmap maps over an axis that an explicit"):
            jax.jit(jax.vmap(lambda x: first_update(tx, x, x)))(x)


@pytest.mark.more
@pytest.mark.parametrize("kind", [A, E])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("is_set", [True, False])
def test_gradients_through_an_update(kind, told, is_set):
    """Where no mesh is set, arrays alone say which it is."""
    mesh = mesh_of(kind, **SIZES)
    shardings = on_mesh(mesh, SPECS)

    def loss(tx):
        return lambda x: sum(jnp.sum(u**3) for u in first_update(tx, x, x).values())

    expected = jax.grad(loss(make()))(PARAMS)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        tx = make(shardings if told else None)
        found = jax.jit(jax.grad(loss(tx)))(jax.device_put(PARAMS, shardings))
    for x, y in leaf_pairs(found, expected):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_vmap_over_a_hyperparameter_on_a_mesh():
    sharding = NamedSharding(mesh_of(A, **SIZES), P("a", "b"))
    x = jax.device_put(PARAMS["wide"], sharding)

    def update(scale, x):
        return first_update(mc.muon(1.0, consistent_rms=scale), x, x)

    found = jax.jit(jax.vmap(update, (0, None)))(jnp.array([1.0, 5.0]), x)
    for scale, y in zip((1.0, 5.0), found, strict=True):
        expected = update(scale, PARAMS["wide"])
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["jit", "eager"])
def test_state_of_the_clip_has_one_sharding_from_init_on(is_compiled):
    mesh = mesh_of(E, f=2)
    kernel = jax.device_put(jnp.ones((8, 2, 4)), NamedSharding(mesh, P("f")))
    params = {"attn": {n: {"kernel": kernel} for n in ("query", "key")}}
    stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
    stats = jax.device_put(stats, NamedSharding(mesh, P()))
    tx = mc.qk_clip()
    state = (jax.jit(tx.init) if is_compiled else tx.init)(params)
    step = jax.jit(lambda p, s: tx.update(p, s, p, attention_stats=stats))
    _, after = step(params, state)
    assert int(after.num_clipped) == 1
    for one, two in zip(state, after, strict=True):
        assert one.sharding == two.sharding
    step(params, after)
    assert step._cache_size() == 1


def draw(seed):
    kernel = {"kernel": normal((seed, 0), 4, 8, 2, 4)}
    matrices = {f"layer_{i}": {"kernel": normal((seed, i), 4, 8, 16)} for i in (1, 2)}
    return matrices | {"attn": {"query": kernel, "key": kernel}}


def member(tree, i):
    return jax.tree.map(lambda x: np.asarray(x)[i], tree)


@pytest.mark.parametrize(
    "is_set, is_told",
    [more(True, True), more(True, False), more(False, True), (False, False)],
)
def test_members_of_an_ensemble_do_not_mix(is_set, is_told):
    """On one axis of a mesh, with the matrices cut along the other."""
    mesh = mesh_of(ens=4, fsdp=2)
    params = draw(0)
    stats = {"attn": {"max_logits": 100 * np.abs(normal(5, 4, 2))}}
    placed = jax.device_put(params, NamedSharding(mesh, P("ens", "fsdp")))
    shardings = NamedSharding(mesh, P("fsdp")) if is_told else None

    def two_steps(tx, params, stats):
        step, state = step_of(tx), tx.init(params)
        for _ in range(2):
            after, state = step(params, state, params, attention_stats=stats)
        return after, state

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        told = functools.partial(two_steps, mc.muonclip(1e-2, shardings=shardings))
        found = jax.jit(jax.vmap(told, spmd_axis_name="ens"))(placed, stats)
    alone = jax.jit(functools.partial(two_steps, mc.muonclip(1e-2)))
    for i in range(4):
        expected = alone(member(params, i), member(stats, i))
        chex.assert_trees_all_close(member(found, i), expected, rtol=1e-4, atol=1e-5)

"""Explicit axes: under `vmap`, under differentiation, and without an optimizer."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import more, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

A, E = AxisType.Auto, AxisType.Explicit
SPECS = {"wide": P("a", "b"), "stack": P(None, "b", "a"), "tall": P(("a", "b"))}
PARAMS = {"wide": (8, 16), "stack": (3, 8, 8), "tall": (16, 4)}
PARAMS = {name: normal(i, *shape) for i, (name, shape) in enumerate(PARAMS.items())}


def mesh_of(*types):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=types)


def make(shardings=None):
    numbers = MuonDimensionNumbers(-2, -1)
    return mc.muon(
        1.0,
        orthogonalizer=mc.NewtonSchulz(steps=2),
        dimension_numbers=numbers,
        shardings=shardings,
    )


def updated(tx, params):
    return tx.update(params, tx.init(params), params)[0]


@pytest.mark.more
@pytest.mark.parametrize("spec", [P(None, "b"), more(P("a", "b"))])
def test_the_derivative_of_newton_schulz(spec):
    """In several batches: a matrix has more entries than a batch on CPU."""
    x = normal(0, 4, 160, 140)
    gradient = jax.grad(lambda x: jnp.sum(mc.newton_schulz(x, steps=2) ** 3))
    found = jax.jit(gradient)(jax.device_put(x, NamedSharding(mesh_of(E, E), spec)))
    np.testing.assert_allclose(found, gradient(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [P("a", "b"), P(None, "a", "b"), P(("a", "b")), P("b", None, "a"), P(None, "a")],
)
@pytest.mark.parametrize("is_mapped", [more(False), True])
def test_newton_schulz_of_cut_matrices(spec, is_mapped):
    mesh, x = mesh_of(E, E), normal(0, 8, 4, 12).at[:, :, :8].get()
    function = jax.vmap(mc.newton_schulz) if is_mapped else mc.newton_schulz
    with jax.set_mesh(mesh):
        y = jax.jit(function)(jax.device_put(x, NamedSharding(mesh, spec)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    np.testing.assert_allclose(y, mc.newton_schulz(x), atol=1e-4)


def test_vmap_over_a_population():
    mesh, tx = mesh_of(E, E), make()
    population, spec = normal(0, 4, 8, 16), P(None, "a")
    expected = [updated(tx, x) for x in population]
    with jax.set_mesh(mesh):
        x = jax.device_put(population, NamedSharding(mesh, spec))
        y = jax.jit(jax.vmap(lambda x: updated(tx, x)))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    np.testing.assert_allclose(y, jnp.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P("b", None, "a")])
def test_vmap_over_what_an_explicit_axis_shards_is_refused(spec):
    mesh, tx = mesh_of(E, E), make()
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(0, 4, 8, 16), NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match="vmap maps over an axis that an explicit"):
            jax.jit(jax.vmap(lambda x: updated(tx, x)))(x)


@pytest.mark.more
@pytest.mark.parametrize("types", [(A, A), (E, E)])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("is_set", [True, False])
def test_gradients_through_an_update(types, told, is_set):
    """Where no mesh is set, arrays alone say which it is."""
    mesh = mesh_of(*types)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

    def loss(tx):
        return lambda x: sum(jnp.sum(u**3) for u in updated(tx, x).values())

    expected = jax.grad(loss(make()))(PARAMS)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        tx = make(shardings if told else None)
        found = jax.jit(jax.grad(loss(tx)))(jax.device_put(PARAMS, shardings))
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=1e-4)


def test_vmap_over_a_hyperparameter_on_a_mesh():
    mesh = mesh_of(A, A)
    x = jax.device_put(PARAMS["wide"], NamedSharding(mesh, P("a", "b")))

    def update(scale, x):
        return updated(mc.muon(1.0, consistent_rms=scale), x)

    found = jax.jit(jax.vmap(update, (0, None)))(jnp.array([1.0, 5.0]), x)
    for scale, y in zip((1.0, 5.0), found, strict=True):
        expected = update(scale, PARAMS["wide"])
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["jit", "eager"])
def test_state_of_the_clip_has_one_sharding_from_init_on(is_compiled):
    mesh = jax.make_mesh((2,), ("f",), axis_types=(AxisType.Explicit,))
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

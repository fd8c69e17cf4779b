"""What orthogonalizes may be given: an SVD is an SVD, wherever the matrices are."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_where, first_update, mesh_of, normal, on_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


def svd(x):
    u, _, vt = jnp.linalg.svd(x, full_matrices=False)
    return u @ vt


@dataclasses.dataclass(frozen=True)
class Svd:
    """As an object, which is compared by its value."""

    power: float = 1.0

    def orthogonalize(self, x):
        return svd(x) ** self.power


@dataclasses.dataclass
class CalledSvd:
    """Called, and compared by what it holds, so that it has no hash."""

    factor: np.ndarray = dataclasses.field(default_factory=lambda: np.ones((1, 1)))

    def __call__(self, x):
        return svd(x) * self.factor


class SvdModule(eqx.Module):
    factor: jax.Array

    def __call__(self, x):
        return svd(x) * self.factor


class ModuleWithSvd(SvdModule):
    def orthogonalize(self, x):
        return svd(x) * self.factor


FORMS = [
    svd, Svd(), Svd().orthogonalize, CalledSvd(), SvdModule(jnp.ones(())),
    ModuleWithSvd(jnp.ones(())),
]  # fmt: skip

PARAMS = {
    "wide": normal(0, 8, 16),
    "tall": normal(1, 16, 8),
    "stack": normal(2, 3, 8, 16),
    "fused": normal(3, 8, 24),
}
#: Three matrices side by side, and four heads in the first two of them.
FUSED = mc.MatrixAxes(0, 1, parts=(8, 8, 8), head_dim=(4, 4, None))
NUMBERS = {"fused": FUSED, "*": mc.MuonDimensionNumbers(-2, -1)}
SPECS = {
    "wide": P("a", "b"),
    "tall": P(("b", "a")),
    "stack": P(None, None, "a"),
    "fused": P("a", None),
}
make = functools.partial(
    mc.scale_by_muon, dimension_numbers=NUMBERS, consistent_rms=1.0, beta=0.9
)


def polar(x):
    u, _, vt = np.linalg.svd(np.float64(x), full_matrices=False)
    return u @ vt * np.sqrt(max(x.shape[-2:]))


def expected(params=PARAMS):
    fused = np.split(np.asarray(params["fused"]), [4, 8, 12, 16], axis=1)
    pieces = np.concatenate([polar(x) for x in fused], axis=1)
    return {k: polar(x) for k, x in params.items()} | {"fused": pieces}


def check(updates):
    assert_close(jax.device_get(updates), expected(), 2e-4)


mesh = functools.partial(mesh_of, a=4, b=2)


@pytest.mark.parametrize("orthogonalizer", FORMS, ids=lambda x: type(x).__name__)
def test_on_one_device(orthogonalizer):
    tx = make(orthogonalizer=orthogonalizer)
    check(jax.jit(tx.update)(PARAMS, tx.init(PARAMS))[0])
    check(tx.update(PARAMS, tx.init(PARAMS))[0])
    with jax.no_tracing():  # the program of the eager update is found again
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("type_", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(is_told, type_):
    shardings = on_mesh(mesh(type_), SPECS)
    params = jax.device_put(PARAMS, shardings)
    tx = make(orthogonalizer=svd, shardings=shardings if is_told else None)
    updates, _ = jax.jit(tx.update)(params, tx.init(params))
    check(updates)
    assert_where(updates, shardings)


def test_in_shard_map():
    tx = make(orthogonalizer=svd, shardings=SPECS)
    update = functools.partial(first_update, tx)
    update = jax.shard_map(update, mesh=mesh(), in_specs=(SPECS,), out_specs=SPECS)
    check(jax.jit(update)(PARAMS))


def test_under_pmap():
    tx = make(orthogonalizer=svd, axis_name="replica")
    params = jax.tree.map(lambda x: jnp.stack([x] * 8), PARAMS)
    updates = jax.pmap(functools.partial(first_update, tx), "replica")(params)
    for i in (0, 7):
        check(jax.tree.map(lambda x, at=i: x[at], updates))


def test_it_sees_inputs_by_outputs_in_float32():
    """Those of a tall matrix too, which Newton-Schulz iterates from the other side."""
    seen = []

    def rows(x):
        seen.append((x.shape[-2:], x.dtype.name))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    tx = make(orthogonalizer=rows, mu_dtype="bfloat16")
    updates = first_update(tx, PARAMS)
    sizes = ((16, 8), (8, 16), (8, 4), (8, 8))
    assert set(seen) == {(size, "float32") for size in sizes}
    rows = np.linalg.norm(updates["tall"], axis=1) / 4
    np.testing.assert_allclose(rows, 1, rtol=0.01)


@pytest.mark.more
def test_the_gradient_of_an_update_is_that_of_the_function():
    def through(orthogonalizer):
        tx = mc.scale_by_muon(orthogonalizer=orthogonalizer)

        def first_row(x):
            return jnp.sum(first_update(tx, {"w": x})["w"][0])

        return jax.grad(first_row)(PARAMS["wide"])

    def steps(x):
        return mc.newton_schulz(x, "deepseek_v4")

    assert_close(through(steps), through("deepseek_v4"), 1e-3)


@pytest.mark.parametrize("factory", [mc.muon, mc.muonclip])
def test_injected_is_what_is_bare(factory):
    """Equal but for rounding, and any hyperparameter may change without compiling."""
    params = {"w": normal(0, 24, 80), "bias": normal(1, 24)}
    options = {"orthogonalizer": mc.NewtonSchulz(dtype="bfloat16")}
    extra = {"attention_stats": {}} if factory is mc.muonclip else {}
    bare, injected = (
        make(learning_rate=1e-2, **options)
        for make in (factory, optax.inject_hyperparams(factory))
    )
    expected, _ = jax.jit(bare.update)(params, bare.init(params), params, **extra)
    update, state = jax.jit(injected.update), injected.init(params)
    actual, _ = update(params, state, params, **extra)
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-4, atol=1e-7)
    for name, value in state.hyperparams.items():
        state.hyperparams[name] = value + 1
        update(params, state, params, **extra)
    assert update._cache_size() == 1


def test_a_function_injected_as_it_is():
    tx = optax.inject_hyperparams(mc.muon, static_args="orthogonalizer")(
        1.0, orthogonalizer=svd, consistent_rms=1.0, weight_decay=0.0
    )
    params = {"w": PARAMS["wide"]}
    updates = first_update(tx, params, params)
    assert_close(updates, {"w": -polar(params["w"])}, 2e-4)


def test_values():
    """Equal by what they say, and usable as keys, whichever way it was said."""
    triple = (3.4445, -4.775, 2.0315)
    assert mc.NewtonSchulz() == mc.NewtonSchulz("keller") != mc.NewtonSchulz("quintic")
    as_array = mc.NewtonSchulz(np.array(triple), steps=np.int64(3), dtype=jnp.bfloat16)
    as_tuple = mc.NewtonSchulz([triple] * 3, steps=3, dtype="bfloat16")
    assert as_array == as_tuple and hash(as_array) == hash(as_tuple)
    assert not callable(mc.NewtonSchulz())
    with pytest.raises(dataclasses.FrozenInstanceError):
        mc.NewtonSchulz().steps = 3
    x = PARAMS["stack"]
    np.testing.assert_array_equal(
        mc.NewtonSchulz("cubic5").orthogonalize(x), mc.newton_schulz(x, "cubic5")
    )

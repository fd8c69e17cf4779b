"""A number of steps known only at run time: as exact as one known before, as fast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import matrix_of, normal, polynomial_of

import muonclip_jax as mc


KELLER = mc.NS_COEFFS["keller"][0]
X = normal(0, 24, 80)


@pytest.mark.parametrize("coeffs", ["keller", KELLER, "polar_express_6"])
@pytest.mark.parametrize("steps", [1, 3, 5, 6, 9])
def test_any_number_of_steps(coeffs, steps):
    """Those beyond the end of a preset repeat its last triple."""
    schedule = mc.NS_COEFFS[coeffs] if isinstance(coeffs, str) else (KELLER,)
    schedule = [schedule[min(i, len(schedule) - 1)] for i in range(steps)]
    y = jax.jit(lambda n: mc.newton_schulz(X, ns_coeffs=coeffs, ns_steps=n))(steps)
    expected = polynomial_of(np.float64(X), schedule)
    np.testing.assert_allclose(y, expected, atol=1e-4)


def test_float64_is_kept():
    with jax.enable_x64():
        x = jnp.asarray(matrix_of(np.linspace(0.1, 1, 4), 4, 6))
        for steps in (3, 5):
            y = jax.jit(lambda n: mc.newton_schulz(x, ns_steps=n))(steps)
            expected = polynomial_of(np.asarray(x), [KELLER] * steps)
            np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("factory", [mc.muon, mc.muonclip])
def test_injected_is_what_is_bare(factory):
    """Equal but for rounding, and any hyperparameter may change without compiling."""
    params = {"w": X, "bias": normal(1, 24)}
    options = {"ns_dtype": "bfloat16"}  # in which the two forms differ visibly
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
    assert "ns_steps" in state.hyperparams
    for name, value in state.hyperparams.items():
        state.hyperparams[name] = value + 1
        update(params, state, params, **extra)
    assert update._cache_size() == 1

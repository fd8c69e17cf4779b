"""A `beta` that is a schedule: in each step it is what the schedule says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PARAMS = {"w": normal(0, 8, 12)}
RISING = optax.linear_schedule(0.5, 0.9, 3)


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
@pytest.mark.parametrize("wrap", [lambda make: make, optax.inject_hyperparams])
def test_rises_from_085_to_095_over_300_steps_by_default(make, wrap):
    rising = {"beta": lambda count: 0.85 + 0.1 * jnp.minimum(count, 300) / 300}
    ends = []
    for options in ({}, rising):
        tx = wrap(make)(0.1, orthogonalizer=mc.NewtonSchulz(steps=1), **options)
        state = tx.init(PARAMS)
        # From a step before its end, in the counts that both kinds of state keep.
        state = optax.tree.map_params(
            tx, lambda x: x, state, transform_non_params=lambda x: _later(x, 298)
        )
        for step in range(4):
            g = {"w": normal((step, 2), 8, 12)}
            update, state = tx.update(g, state, PARAMS, attention_stats={})
        ends.append(update["w"])
    np.testing.assert_allclose(*ends, atol=1e-5)


def _later(x, steps):
    """A count that is `steps` further on; what is no count stays."""
    is_count = jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 0
    return x + steps if is_count else x


@pytest.mark.parametrize("made, given", [(RISING, 0.9), (0.9, RISING)])
def test_a_run_goes_on_with_a_beta_of_the_other_kind(made, given):
    tx = mc.scale_by_muon(beta=made)
    _, state = tx.update(PARAMS, tx.init(PARAMS))
    first = state.mu["w"]
    _, state = mc.scale_by_muon(beta=given).update(PARAMS, state)
    beta = given(1) if callable(given) else given
    expected = beta * first + PARAMS["w"]
    np.testing.assert_allclose(state.mu["w"], expected, rtol=1e-5)
    assert state.count == 2


@pytest.mark.parametrize("value, clipped", [(-0.5, 0.0), (1.5, 1.0), (np.nan, 0.0)])
def test_out_of_range(value, clipped):
    """An error where it begins so; later clipped, where it would grow or destroy."""
    for make in (mc.scale_by_muon, functools.partial(mc.muonclip, 0.1)):
        with pytest.raises(ValueError, match="beta must be in .*begins at"):
            make(beta=lambda step: value).init(PARAMS)
        # Under `jit` a schedule of arrays has no value yet.
        jax.jit(make(beta=lambda step: jnp.asarray(value)).init)(PARAMS)
    tx = mc.scale_by_muon(beta=lambda step: jnp.where(step < 1, 0.5, value))
    _, state = tx.update(PARAMS, tx.init(PARAMS))
    for update in (tx.update, jax.jit(tx.update)):
        _, after = update(PARAMS, state)
        expected = (1 + clipped) * PARAMS["w"]
        np.testing.assert_allclose(after.mu["w"], expected, rtol=1e-6)

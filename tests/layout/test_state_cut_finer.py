"""Momentum cut over replicas, too, by finer specs in `shardings` (ZeRO)."""

import jax
import numpy as np
import optax
import pytest
from helpers import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PARAMS = {"up": normal(0, 3, 16, 32), "down": normal(1, 5, 32, 16)}


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def make(shardings=None):
    return mc.muon(
        1e-1,
        dimension_numbers=mc.MuonDimensionNumbers(-2, -1),
        orthogonalizer=mc.NewtonSchulz(steps=2),
        shardings=shardings,
    )


@pytest.mark.more
def test_momentum_over_replicas_and_params_over_data():
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    of_params = NamedSharding(mesh, P(None, "data"))
    of_state = NamedSharding(mesh, P(None, ("replica", "data")))
    grads = jax.tree.map(np.flip, PARAMS)
    alone, expected = make(), PARAMS
    state = alone.init(PARAMS)
    tx, params = make(of_state), jax.device_put(PARAMS, of_params)
    with jax.set_mesh(mesh):
        finer = jax.jit(tx.init)(params)
        step = jax.jit(step_of(tx), out_shardings=(of_params, None))
        for _ in range(2):
            params, finer = step(params, finer, grads)
            expected, state = jax.jit(step_of(alone))(expected, state, grads)
        assert step._cache_size() == 1
    momentum = finer.inner_states["muon"].inner_state[0].mu
    for name, x in momentum.items():
        assert x.sharding.is_equivalent_to(of_state, x.ndim)
        assert params[name].sharding.is_equivalent_to(of_params, x.ndim)
        # A step changes entries by 0.1 times some units, good to 12 * 32 * 2^-24.
        np.testing.assert_allclose(params[name], expected[name], rtol=0, atol=1e-5)

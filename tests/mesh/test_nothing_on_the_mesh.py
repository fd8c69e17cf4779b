"""A mesh that is set, and a program none of whose arguments are on it yet."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import more, normal
from jax.sharding import AxisType

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")
PARAMS = {"dense": {"kernel": normal(0, 16, 8)}}
OPTIMIZERS = {
    "plain": mc.muon(1e-1),
    "neurons": mc.muon(1e-1, neuron_b2=0.95),
    "8 bits": mc.muon(1e-1, mu_dtype="int8"),
}


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def two_steps(tx, params, state):
    for _ in range(2):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("init_inside", [more(False), True])
def test_update_is_that_without_a_mesh(mesh, name, init_inside):
    tx = OPTIMIZERS[name]
    expected = two_steps(tx, PARAMS, tx.init(PARAMS))["dense"]["kernel"]
    before = tx.init(PARAMS)

    @jax.jit
    def step(params, state):
        return two_steps(tx, params, tx.init(params) if init_inside else state)

    with jax.set_mesh(mesh):
        found = step(PARAMS, before)["dense"]["kernel"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.more
def test_derivative_through_an_update(mesh):
    tx = mc.muon(1e-1)

    def loss(params):
        return jnp.sum(two_steps(tx, params, tx.init(params))["dense"]["kernel"] ** 3)

    expected = jax.grad(loss)(PARAMS)["dense"]["kernel"]
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(PARAMS)["dense"]["kernel"]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)

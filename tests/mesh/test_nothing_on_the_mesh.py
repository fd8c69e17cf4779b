"""A mesh that is set, and a program none of whose arguments are on it yet."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import more, normal
from jax.sharding import AxisType
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")
# One matrix, and two stacks that devices share out evenly, together.
SHAPES = {"kernel": (16, 8), "gate": (8, 6, 4), "up": (8, 6, 4)}
PARAMS = {name: normal(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
muon = functools.partial(mc.muon, 1e-1, dimension_numbers={"*": Numbers(-2, -1)})
OPTIMIZERS = {
    "plain": muon(),
    "neurons": muon(neuron_b2=0.95),
    "8 bits": muon(mu_dtype="int8"),
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
    expected = two_steps(tx, PARAMS, tx.init(PARAMS))
    before = tx.init(PARAMS)

    @jax.jit
    def step(params, state):
        return two_steps(tx, params, tx.init(params) if init_inside else state)

    with jax.set_mesh(mesh):
        found = step(PARAMS, before)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.more
def test_derivative_through_an_update(mesh):
    tx = muon()

    def loss(params):
        return jnp.sum(two_steps(tx, params, tx.init(params))["kernel"] ** 3)

    expected = jax.grad(loss)(PARAMS)["kernel"]
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(PARAMS)["kernel"]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)

"""States that other settings made, and settings that a wrapper made numbers of."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import normal

import muonclip_jax as mc


PARAMS = {
    "up": {"kernel": normal(0, 4, 6), "bias": normal(1, 6)},
    "mid": {"kernel": normal(2, 6, 6), "bias": normal(3, 6)},
    "down": {"kernel": normal(4, 6, 5), "bias": normal(5, 5)},
}


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize(
    "before, after",
    [
        ({}, {"dimension_numbers": {"mid/*": None}}),
        ({"dimension_numbers": {"mid/*": None}}, {}),
        ({}, {"neuron_b2": 0.9}),
        ({"neuron_b2": 0.9}, {}),
        ({}, {"adam_learning_rate": optax.constant_schedule(0.1)}),
    ],
)
def test_a_state_of_other_settings_is_named(before, after, is_jitted):
    state = mc.muon(0.1, **before).init(PARAMS)
    tx = mc.muon(0.1, **after)
    update = jax.jit(tx.update) if is_jitted else tx.update
    with pytest.raises(ValueError, match="made by a muon with other settings.*init"):
        update(PARAMS, state, PARAMS)


def test_another_mistake_is_reported_as_it_came():
    tx = mc.muon(0.1)
    with pytest.raises(ValueError, match="needs the params"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    "name, function",
    [
        ("weight_decay_mask", lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        ("weight_decay_mask", lambda p: jax.tree.map(jnp.ndim, p)),
        ("dimension_numbers", lambda p: jax.tree.map(lambda _: 3, p)),
    ],
)
def test_functions_that_were_called_as_schedules(name, function):
    options = {"learning_rate": 0.1, name: function}
    tx = optax.inject_hyperparams(mc.muon)(**options)
    with pytest.raises(ValueError, match=rf"static_args=\('{name}',\)"):
        tx.init(PARAMS)


def test_functions_as_static_arguments():
    is_matrix = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    options = {"weight_decay": 0.5, "weight_decay_mask": is_matrix}
    static = ("weight_decay_mask",)
    tx = optax.inject_hyperparams(mc.muon, static_args=static)(0.1, **options)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    decayed = {name: bool(x["kernel"].any()) for name, x in updates.items()}
    assert decayed == dict.fromkeys(PARAMS, True)
    assert not any(x["bias"].any() for x in updates.values())

"""States that other settings made, and settings that a wrapper made numbers of."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import serialization
from helpers import more, normal

import muonclip_jax as mc


PARAMS = {
    "up": {"kernel": normal(0, 4, 6), "bias": normal(1, 6)},
    "mid": {"kernel": normal(2, 6, 6), "bias": normal(3, 6)},
    "down": {"kernel": normal(4, 6, 5), "bias": normal(5, 5)},
}


@pytest.mark.parametrize("is_jitted", [False, more(True)])
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


STACK = {
    name: {"kernel": normal(i, 8, 2, 4)} for i, name in enumerate(("query", "key"))
}


@pytest.mark.parametrize("options", [{"neuron_b2": 0.9}, {"mu_dtype": "int8"}])
def test_a_state_of_heads_that_were_one_matrix(options):
    """It would be broadcast or dropped, in silence: a state of other shapes."""
    state = mc.muon(0.1, per_head=False, **options).init(STACK)
    with pytest.raises(ValueError, match="made by a muon with other settings"):
        mc.muon(0.1, **options).update(STACK, state, STACK)


SET_UPS = {
    "optax.contrib.muon": optax.contrib.muon(0.1),
    "optax.MultiSteps": optax.MultiSteps(mc.muonclip(0.1), 2),
    "muon": mc.muon(0.1),
    "muonclip": mc.muonclip(0.1),
    "multi_steps": mc.multi_steps(mc.muonclip(0.1), 2),
    "qk_clip": mc.qk_clip(),
    "normalize_neurons": mc.normalize_neurons(),
    "adamw": optax.adamw(0.1),
}


@pytest.mark.parametrize("after", [x for x in SET_UPS if x[:3] not in ("opt", "ada")])
def test_one_message_for_a_state_of_another_set_up(after):
    message = f"init of {after} made|with other settings"
    for before in SET_UPS:
        if before == after:
            continue
        state = SET_UPS[before].init(STACK)
        # As Flax's serialization and Orbax give it where they have nothing to go by.
        for given in (state, serialization.to_state_dict(state)):
            with pytest.raises(ValueError, match=message):
                SET_UPS[after].update(STACK, given, STACK, attention_stats={})


@pytest.mark.parametrize("cautious_weight_decay", [False, True])
def test_a_run_goes_on_with_another_mask_of_decay(cautious_weight_decay):
    options = {"weight_decay": 0.5, "cautious_weight_decay": cautious_weight_decay}
    is_matrix = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    masks = None, is_matrix, {"up": True, "mid": False, "down": False}
    txs = [mc.muon(0.1, weight_decay_mask=mask, **options) for mask in masks]
    states = [tx.init(PARAMS) for tx in txs]
    updates = [tx.update(PARAMS, states[0], PARAMS)[0] for tx in txs]
    for tx, state, update in zip(txs, states, updates, strict=True):
        chex.assert_trees_all_equal_structs(state, states[0])
        chex.assert_trees_all_equal(tx.update(PARAMS, state, PARAMS)[0], update)
    # Everything, kernels, and one module decay.
    decays = [u["mid"]["bias"] for u in updates], [u["mid"]["kernel"] for u in updates]
    assert [bool((x == y[0]).all()) for y in decays for x in y] == [1, 0, 0, 1, 1, 0]


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


def test_a_mask_by_itself_that_was_called_as_a_schedule():
    make = optax.inject_hyperparams(mc.add_cautious_decayed_weights)
    with pytest.raises(ValueError, match=r"static_args=\('mask',\)"):
        make(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)).init(PARAMS)


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

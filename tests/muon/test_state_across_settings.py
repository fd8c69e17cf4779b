"""A state restored under other settings goes on as if it had been theirs, or raises.

The momentum of a setting is a sum of the gradients, so whether a restored state means
what it should is seen from a run of the new settings on the same gradients.
"""

import functools
import itertools
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import few, first_update, more, normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


def draw(seed):
    return {
        "attn": {
            "query": {"kernel": normal((seed, 0), 8, 2, 4)},
            "key": {"kernel": normal((seed, 1), 8, 2, 4)},
        },
        "wide": {"kernel": normal((seed, 2), 6, 12), "bias": normal((seed, 3), 12)},
        "square": {"kernel": normal((seed, 4), 104, 104)},
    }


PARAMS, OLD, NEW = (draw(i) for i in range(3))
STATS = {"attn": {"max_logits": np.asarray([50.0, 400.0], np.float32)}}
PARTS = {"wide/kernel": mc.MatrixAxes(0, 1, parts=(4, 8))}
TURNED = {"square/*": mc.MuonDimensionNumbers(1, 0)}

SETTINGS = {
    "float32": {},
    "float16": {"mu_dtype": "float16"},
    "bfloat16": {"mu_dtype": "bfloat16"},
    "int8": {"mu_dtype": "int8"},
    "int8, whole heads": {"mu_dtype": "int8", "per_head": False},
    "int8, turned": {"mu_dtype": "int8", "dimension_numbers": TURNED},
    "neurons": {"neuron_b2": 0.9},
    "neurons, parts": {"neuron_b2": 0.9, "dimension_numbers": PARTS},
    "whole heads": {"per_head": False},
    "another optimizer": {"dimension_numbers": {"square/*": None}},
    "schedule": {"learning_rate": lambda count: 1e-2},
    "decay by schedule": {"weight_decay": lambda count: 0.1},
    "micro-batches": None,
}
#: Settings that no state depends on.
FREE = {
    "no Nesterov": {"nesterov": False},
    "beta by schedule": {"beta": lambda count: 0.95},
    "orthogonalizer": {"orthogonalizer": "polar_express_6"},
    "function": {"orthogonalizer": lambda x: x / (1 + abs(x).max())},
    "scale": {"consistent_rms": None},
    "no decay": {"weight_decay": 0.0},
    "decay mask": {"weight_decay_mask": {"attn": True, "wide": False, "square": True}},
    "cautious": {"cautious_weight_decay": True},
    "threshold by schedule": {"threshold": lambda count: 100.0},
    "alpha": {"alpha": 0.3},
    "watched": {"threshold": float("inf")},
    "Adam": {"adam_b1": 0.8, "adam_b2": 0.9},
}
CONVERTED = {"float32", "float16", "bfloat16", *FREE}
PAIRS = [
    *itertools.permutations(SETTINGS, 2),
    *(pair for name in FREE for pair in itertools.permutations(("float32", name))),
]


def make(name):
    setting = (SETTINGS | FREE)[name]
    tx = mc.muonclip(**({"learning_rate": 1e-2, "beta": 0.95} | (setting or {})))
    return mc.multi_steps(tx, 1) if setting is None else tx


def after(tx, state, gradients):
    for grads in gradients:
        updates, state = tx.update(grads, state, PARAMS, attention_stats=STATS)
    return updates, state


def by_orbax(tx, state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", tx.init(PARAMS))


def by_msgpack(tx, state, folder):
    return serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))


def by_pickle(tx, state, folder):
    return pickle.loads(pickle.dumps(jax.device_get(state)))


def by_dtypes(tx, state, folder):
    """In the dtypes that these settings would have, as Orbax does, but in memory."""
    own = tx.init(PARAMS)
    chex.assert_trees_all_equal_shapes(own, state)
    return jax.tree.map(lambda x, saved: np.asarray(saved, x.dtype), own, state)


EVERY_DAY = [
    (*pair, restore)
    for pair in itertools.permutations(("float32", "float16"))
    for restore in (by_dtypes, by_msgpack)
]
CASES = {
    **dict.fromkeys(EVERY_DAY),
    **dict.fromkeys(
        (*pair, restore) for pair in PAIRS for restore in (by_msgpack, by_orbax)
    ),
}
# Pickle keeps what msgpack keeps.
PICKLED = [pytest.param(*pair, by_pickle, marks=pytest.mark.slow) for pair in PAIRS]


@pytest.mark.parametrize(
    ("saved", "given", "restore"), [*few(list(CASES), *EVERY_DAY), *PICKLED]
)
def test_a_restored_state_is_as_if_made_by_these_settings(
    saved, given, restore, tmp_path
):
    history = [OLD] * 3
    _, state = after(make(saved), make(saved).init(PARAMS), history)
    tx = make(given)
    can_be_converted = {saved, given} <= CONVERTED
    if {saved, given} == {"float32", "float16"}:
        # What is restored in another dtype has another unit: 32 for 1.
        units = (optax.tree.get(x, "unit") for x in (state, tx.init(PARAMS)))
        assert {*map(float, units)} == {1, 32}
    try:
        restored = restore(tx, state, tmp_path)
    except Exception:  # the checkpointer's own
        assert not can_be_converted
        return
    try:
        updates, _ = after(tx, restored, [NEW] * 2)
    except ValueError as error:
        assert re.search("with other settings|not one that init of", str(error))
        assert not can_be_converted
        return
    _, own = after(tx, tx.init(PARAMS), history)
    expected, _ = after(tx, own, [NEW] * 2)
    vectors = [
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        for tree in (updates, expected)
    ]
    difference = np.linalg.norm(vectors[0] - vectors[1])
    assert difference < 0.02 * np.linalg.norm(vectors[1])


LAYERS = {
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
    state = mc.muon(0.1, **before).init(LAYERS)
    tx = mc.muon(0.1, **after)
    update = jax.jit(tx.update) if is_jitted else tx.update
    with pytest.raises(ValueError, match="made by a muon with other settings.*init"):
        update(LAYERS, state, LAYERS)


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
    states = [tx.init(LAYERS) for tx in txs]
    updates = [tx.update(LAYERS, states[0], LAYERS)[0] for tx in txs]
    for tx, state, update in zip(txs, states, updates, strict=True):
        chex.assert_trees_all_equal_structs(state, states[0])
        chex.assert_trees_all_equal(tx.update(LAYERS, state, LAYERS)[0], update)
    # Everything, kernels, and one module decay.
    decays = [u["mid"]["bias"] for u in updates], [u["mid"]["kernel"] for u in updates]
    assert [bool((x == y[0]).all()) for y in decays for x in y] == [1, 0, 0, 1, 1, 0]


def test_another_mistake_is_reported_as_it_came():
    tx = mc.muon(0.1)
    with pytest.raises(ValueError, match="needs the params"):
        tx.update(LAYERS, tx.init(LAYERS))


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
        tx.init(LAYERS)


def test_a_mask_by_itself_that_was_called_as_a_schedule():
    make = optax.inject_hyperparams(mc.add_cautious_decayed_weights)
    with pytest.raises(ValueError, match=r"static_args=\('mask',\)"):
        make(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)).init(LAYERS)


def test_functions_as_static_arguments():
    is_matrix = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    options = {"weight_decay": 0.5, "weight_decay_mask": is_matrix}
    static = ("weight_decay_mask",)
    tx = optax.inject_hyperparams(mc.muon, static_args=static)(0.1, **options)
    zeros = jax.tree.map(jnp.zeros_like, LAYERS)
    updates = first_update(tx, zeros, LAYERS)
    decayed = {name: bool(x["kernel"].any()) for name, x in updates.items()}
    assert decayed == dict.fromkeys(LAYERS, True)
    assert not any(x["bias"].any() for x in updates.values())

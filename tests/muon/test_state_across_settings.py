"""A state restored under other settings goes on as if it had been theirs, or raises.

The momentum of a setting is a sum of the gradients, so whether a restored state means
what it should is seen from a run of the new settings on the same gradients.
"""

import itertools
import pickle
import re

import chex
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import few, normal

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

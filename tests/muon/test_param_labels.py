"""Labels of leaves, and with them a rate of its own for the output head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import head_apart, more, normal
from optax.contrib import MuonDimensionNumbers as Numbers

import muonclip_jax as mc


PARAMS = {
    "embed": {"embedding": normal(0, 24, 8)},
    "up": {"kernel": normal(1, 8, 16), "bias": normal(2, 16)},
    "down": {"kernel": normal(3, 16, 8)},
    "lm_head": {"kernel": normal(4, 8, 24), "bias": normal(5, 24)},
}
GRADS = jax.tree.map(lambda x: normal(6, *x.shape), PARAMS)
RATES = dict(learning_rate=0.1, adam_learning_rate=0.02)


def updates_of(tx, params=PARAMS, grads=GRADS, steps=3):
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(actual, expected, rtol=1e-6):
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-7)
    jax.tree.map(compare, actual, expected)


def test_what_each_leaf_is():
    params = PARAMS | {
        "norm": {"scale": jnp.ones(8)},
        "positions": {"embedding": jnp.ones((4, 8))},
        "moe": {"router": {"kernel": jnp.ones((8, 4))}, "up": jnp.ones((4, 8, 16))},
    }
    rules = {"moe/router": None, "moe/up": Numbers(-2, -1)}
    assert mc.param_labels(params, dimension_numbers=rules) == {
        "embed": {"embedding": "embedding"},
        "up": {"kernel": "matrix", "bias": "vector"},
        "down": {"kernel": "matrix"},
        "lm_head": {"kernel": "head", "bias": "vector"},
        "norm": {"scale": "vector"},
        "positions": {"embedding": "embedding"},
        "moe": {"router": {"kernel": "router"}, "up": "matrix"},
    }


def test_matrices_are_those_of_the_mask():
    labels = mc.param_labels(PARAMS)
    mask = jax.tree.map(lambda label: label == "matrix", labels)
    assert mask == mc.matrix_mask(PARAMS)


@pytest.mark.parametrize(
    "numbers",
    [
        {"lm_head/kernel": Numbers((0,), (1,))},
        lambda p: mc.flax_dimension_numbers(p) | {"lm_head": Numbers(0, 1)},
    ],
    ids=["patterns", "function"],
)
def test_a_head_that_is_given_as_a_matrix_is_one(numbers):
    if callable(numbers):
        params = PARAMS | {"lm_head": PARAMS["lm_head"]["kernel"]}
        assert mc.param_labels(params, dimension_numbers=numbers)["lm_head"] == "matrix"
    else:
        labels = mc.param_labels(PARAMS, dimension_numbers=numbers)
        assert labels["lm_head"] == {"kernel": "matrix", "bias": "vector"}


def test_hidden_leaves_stay_hidden():
    hidden = PARAMS | {"lm_head": optax.MaskedNode()}
    labels = mc.param_labels(hidden)
    assert labels["lm_head"] == optax.MaskedNode()
    assert labels["up"] == {"kernel": "matrix", "bias": "vector"}


def test_leaves_of_which_nothing_tells():
    with pytest.raises(ValueError, match="cannot decide .*\n +w "):
        mc.param_labels({"w": jnp.ones((3, 4, 5))})


@pytest.mark.parametrize("cautious", [more(False), True])
def test_only_the_head_changes(cautious):
    """The trajectory of the rest is that without the recipe, and the head's AdamW's."""
    muon = mc.muon(**RATES, cautious_weight_decay=cautious)
    actual = updates_of(head_apart(muon, 0.005, 0.1))
    kernel = PARAMS["lm_head"]["kernel"]
    adamw = optax.adamw(0.005, 0.9, 0.95, weight_decay=0.1)
    head = updates_of(adamw, kernel, GRADS["lm_head"]["kernel"])
    expected = updates_of(muon)
    expected["lm_head"]["kernel"] = head
    assert_close(actual, expected, rtol=1e-5)

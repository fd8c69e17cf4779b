"""Labels of leaves and rates by label, scales by shape and rates by width."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import first_update, head_apart, more, normal, trained
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


def after_three_steps(tx, params=PARAMS, grads=GRADS):
    return trained(tx, params, [grads] * 3)[0]


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
    labels = mc.param_labels(params, dimension_numbers=rules)
    assert labels == {
        "embed": {"embedding": "embedding"},
        "up": {"kernel": "matrix", "bias": "vector"},
        "down": {"kernel": "matrix"},
        "lm_head": {"kernel": "head", "bias": "vector"},
        "norm": {"scale": "vector"},
        "positions": {"embedding": "embedding"},
        "moe": {"router": {"kernel": "router"}, "up": "matrix"},
    }
    mask = mc.matrix_mask(params, dimension_numbers=rules)
    assert mask == jax.tree.map(lambda label: label == "matrix", labels)


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
    actual = after_three_steps(head_apart(muon, 0.005, 0.1))
    kernel = PARAMS["lm_head"]["kernel"]
    adamw = optax.adamw(0.005, 0.9, 0.95, weight_decay=0.1)
    head = after_three_steps(adamw, kernel, GRADS["lm_head"]["kernel"])
    expected = after_three_steps(muon)
    expected["lm_head"]["kernel"] = head
    assert_close(actual, expected, rtol=1e-5)


@pytest.mark.more
def test_mup_is_the_root_of_fan_out_over_fan_in():
    shapes = {
        "wide": ((4, 10), Numbers(0, 1), 10 / 4),
        "tall": ((10, 4), Numbers(0, 1), 4 / 10),
        "turned": ((10, 4), Numbers(1, 0), 10 / 4),
        "query": ((8, 3, 4), Numbers(0, (1, 2)), 12 / 8),
        "experts": ((3, 4, 10), Numbers(1, 2), 10 / 4),
    }
    numbers = {name: of for name, (_, of, _) in shapes.items()}
    grads = {name: normal(i, *x) for i, (name, (x, *_)) in enumerate(shapes.items())}
    updates = {}
    for scale in ("mup", 1.0):
        tx = mc.scale_by_muon(consistent_rms=scale, dimension_numbers=numbers)
        updates[scale] = first_update(tx, grads)
    for name, (shape, of, ratio) in shapes.items():
        sizes = [np.prod([shape[i] for i in np.atleast_1d(axes)]) for axes in of]
        expected = updates[1.0][name] * np.sqrt(ratio) / np.sqrt(max(sizes))
        np.testing.assert_allclose(updates["mup"][name], expected, rtol=1e-6)


def test_a_scale_of_ones_own_gets_the_sizes_of_every_matrix():
    """Each piece of a fused kernel by its own shape, and experts one by one."""
    numbers = {
        "qkv": mc.MatrixAxes(0, 1, parts=(4, 6, 2)),
        "experts": Numbers(-2, -1),
        "turned": Numbers(1, 0),
    }
    shapes = {"qkv": (8, 12), "experts": (3, 8, 5), "turned": (7, 8)}
    grads = {name: normal(shape, *shape) for name, shape in shapes.items()}
    seen, found = set(), {}

    def scale(fan_in, fan_out):
        seen.add((fan_in, fan_out))
        return fan_out / (1 + fan_in)

    for rms in (scale, "mup"):
        tx = mc.scale_by_muon(consistent_rms=rms, dimension_numbers=numbers)
        found[rms] = first_update(tx, grads)
    assert seen == {(8, 4), (8, 6), (8, 2), (8, 5), (8, 7)}
    outputs = {"qkv": np.repeat([4, 6, 2], (4, 6, 2)), "experts": 5, "turned": 7}
    for name, n in outputs.items():
        ratio = n / 9 / np.sqrt(n / 8)
        expected = found["mup"][name] * jnp.asarray(ratio, jnp.float32)
        np.testing.assert_allclose(found[scale][name], expected, rtol=1e-5)


@pytest.mark.parametrize("value", ["0.2", None, -1.0, float("nan"), jnp.ones(2)])
def test_a_scale_that_is_no_number_names_the_sizes(value):
    tx = mc.scale_by_muon(consistent_rms=lambda fan_in, fan_out: value)
    grads = {"w": normal(0, 3, 4)}
    with pytest.raises(ValueError, match=r"consistent_rms\(3, 4\) must be"):
        tx.update(grads, tx.init(grads))


@pytest.mark.parametrize("width", [32, 128])
def test_what_a_step_does_to_features_does_not_depend_on_the_width(width):
    """Two layers whose widths grow move the root mean square of their output alike."""
    x = normal(0, 500, width)
    tx = mc.scale_by_muon(consistent_rms="mup", orthogonalizer="deepseek_v4")
    grads = {"up": normal(1, width, 4 * width), "down": normal(2, 4 * width, width)}
    updates = first_update(tx, grads)
    hidden = x @ updates["up"]
    features = (x, hidden, hidden @ updates["down"])
    sizes = [np.sqrt(np.mean(np.square(y))) for y in features]
    np.testing.assert_allclose(sizes[1], sizes[0], rtol=0.02)
    # A random matrix passes on a quarter of what its larger input holds.
    np.testing.assert_allclose(sizes[2], sizes[1] / 2, rtol=0.1)


def test_steps_fall_with_the_width():
    """A rate for every kind of leaf, tuned at a width of 4."""
    params = {
        "embed": {"embedding": jnp.ones((16, 4))},
        "block_0": {
            "up": {"kernel": jnp.ones((4, 8))},
            "down": {"kernel": jnp.ones((8, 4))},
        },
        "head": {"kernel": jnp.ones((4, 16))},
    }

    def first_step(width):
        r = 4 / width
        muon = mc.muon(
            0.1 * r ** (1 / 3),
            adam_learning_rate=0.1 * r ** (1 / 2),
            consistent_rms="mup",
            weight_decay=0.0,
        )
        tx = head_apart(muon, 0.1 * r, 0.0)
        return first_update(tx, params, params)

    small, large = first_step(4), first_step(256)
    for name, ratio in {"head": 1 / 64, "embed": 1 / 8, "block_0": 1 / 4}.items():
        expected = optax.tree.scale(ratio, small[name])
        chex.assert_trees_all_close(large[name], expected, rtol=1e-5, atol=1e-7)


def test_refusals():
    with pytest.raises(ValueError, match="or 'mup' or None or a function.*, got 'mu'"):
        mc.muon(1e-2, consistent_rms="mu")
    with pytest.raises(ValueError, match="'mup'"):
        mc.scale_by_muon(consistent_rms="rms")
    for rms in (-0.2, math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite and not negative"):
            mc.scale_by_muon(consistent_rms=rms)

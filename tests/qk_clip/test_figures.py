"""Scales of given statistics: published figures, bad values, every wrapping."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import clip_at_rest, randomize
from internals import gammas

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")
zero_step = clip_at_rest()


# Reference figures of other implementations; see the named tests there.
@pytest.mark.parametrize(
    "logits, threshold, expected",
    [
        ([100.0, 400.0], 200.0, [1.0, 0.5]),  # torchtitan optimizer_hook_scales_q_and_k
        ([200.0, 400.0], 100.0, [0.5, 0.25]),  # torchtitan, maximum over two ranks
        ([50.0, 60.0, 70.0, 80.0], 100.0, [1.0] * 4),  # Megatron below_threshold
        ([150.0, 160.0, 170.0, 180.0], 100.0, [2 / 3, 0.625, 1 / 1.7, 1 / 1.8]),
        ([80.0, 150.0, 90.0, 200.0], 100.0, [1.0, 2 / 3, 1.0, 0.5]),  # Megatron mixed
        ([150.0, -0.0, 0.0, -5.0, 100.0], 100.0, [2 / 3, 1, 1, 1, 1]),  # Megatron #7517
        ([40.0, 9.9, 1.0], 10.0, [0.25, 1.0, 1.0]),  # MaxText per_head_clipping
    ],
)
def test_figures_of_other_implementations(logits, threshold, expected):
    actual = gammas(jnp.asarray(logits), threshold)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_array_equal(actual == 1, np.asarray(expected) == 1)


def test_a_head_at_the_threshold_is_not_counted():
    """MindFormers: [[99, 100], [101, 150]] with tau 100 counts two."""
    ones = jnp.ones((2, 4, 2, 2))
    params = {"query": {"kernel": ones}, "key": {"kernel": ones}}
    stats = {"max_logits": jnp.asarray([[99.0, 100.0], [101.0, 150.0]])}
    _, state = zero_step(params, stats, 100.0)
    assert optax.tree.get(state, "num_clipped") == 2


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_non_finite_statistic_leaves_its_head_alone_and_is_counted(value):
    kernel = randomize(jnp.ones((4, 3, 2)))
    params = {"query": {"kernel": kernel}, "key": {"kernel": kernel}}
    stats = {"max_logits": jnp.asarray([value, 400.0, 50.0])}
    after, state = zero_step(params, stats, 100.0)
    assert jnp.isfinite(after["query"]["kernel"]).all()
    chex.assert_trees_all_equal(after["query"]["kernel"][:, [0, 2]], kernel[:, [0, 2]])
    assert optax.tree.get(state, "num_nonfinite") == 1
    assert optax.tree.get(state, "num_clipped") == 1
    assert optax.tree.get(state, "max_logit") == 400


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"intermediates": {"attn": {"max_logits": s}}},
        lambda s: {"intermediates": {"params": {"attn": {"max_logits": s}}}},
        lambda s: {"attn": {"max_logits": (s,)}},
        lambda s: {"attn": {"max_logits": s, "attention_weights": (jnp.ones((2, 2)),)}},
        lambda s: {"attn": {"max_logits": (s, s - 1)}},
        lambda s: {"attn": {"max_logits": np.asarray(s)}},
        lambda s: nnx.State({"attn": {"max_logits": nnx.Intermediate(s)}}),
        lambda s: nnx.State({"attn": {"max_logits": nnx.Intermediate((s,))}}),
    ],
)
@pytest.mark.parametrize("outer", [False, True])
def test_statistics_in_every_wrapping(wrap, outer):
    ones = jnp.ones((3, 2, 2))
    params = {"attn": {"query": {"kernel": ones}, "key": {"kernel": ones}}}
    given = {"params": params} if outer else params
    after = mc.clip_qk(given, wrap(jnp.asarray([50.0, 400.0])))
    after = after["params"] if outer else after
    np.testing.assert_allclose(after["attn"]["query"]["kernel"][0, :, 0], [1, 0.5])

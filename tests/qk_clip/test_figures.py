"""Scales of given statistics: bad values, every wrapping."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import clip_at_rest, randomize

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")
zero_step = clip_at_rest()


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

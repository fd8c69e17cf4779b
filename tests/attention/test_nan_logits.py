"""A NaN among the logits is counted; XLA's maximum of many numbers loses it on CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import more, normal

import muonclip_jax as mc


#: Query, key and options to the statistic, by every route.
ROUTES = {
    "max_logits": mc.max_logits,
    "blockwise": lambda q, k, **o: mc.blockwise_attention(q, k, k, **o)[1],
    "small blocks": lambda q, k, **o: mc.blockwise_attention(
        q, k, k, block_size=48, **o
    )[1],
    "splash": lambda q, k, **o: mc.splash_attention(q, k, k, interpret=True, **o)[1],
}
#: Short, as long as a vector register wants it, and in blocks.
LENGTHS = {"max_logits": (3, 65, 1100), "blockwise": (3, 65, 600), "splash": (128,)}


CASES = [(route, n) for route in ROUTES for n in LENGTHS.get(route, (3, 65))]


def qk(length, heads=3):
    return normal(0, 2, length, heads, 4), normal(1, 2, length, heads, 4)


@pytest.mark.parametrize("jit", [True, more(False)])
@pytest.mark.parametrize("route, length", CASES)
def test_a_nan_of_one_head_reaches_its_statistic_alone(route, length, jit):
    query, key = qk(length)
    find = jax.jit(ROUTES[route]) if jit else ROUTES[route]
    expected = np.array(find(query, key))
    assert np.isfinite(expected).all()
    expected[1] = np.nan
    for broken in (
        (query.at[1, length // 2, 1, 2].set(jnp.nan), key),
        (query, key.at[0, length - 1, 1, 0].set(jnp.nan)),
    ):
        np.testing.assert_allclose(find(*broken), expected, rtol=1e-5)


@pytest.mark.parametrize("route, length", CASES)
def test_a_nan_that_the_mask_hides_is_none(route, length):
    query, key = qk(length)
    find = jax.jit(
        functools.partial(ROUTES[route], is_causal=True, local_window_size=1)
    )
    # No query sees its key but the last one, of which the mask hides the batch.
    broken = key.at[1, length - 1, 2].set(jnp.nan)
    ids = jnp.ones((2, length), jnp.int32).at[1, length - 1].set(2)
    options = dict(query_segment_ids=ids, key_segment_ids=ids.at[1, -1].set(3))
    np.testing.assert_array_equal(
        find(query, broken, **options), find(query, key, **options)
    )


@pytest.mark.parametrize("size", [5, 300])
def test_infinities_stay_what_they_are(size):
    """A sum of both is NaN, and the largest float32 must not overflow in one."""
    query, key = qk(size, heads=5)
    bias = jnp.zeros((5, size, size)).at[1, 2, 3].set(jnp.inf).at[2].set(-jnp.inf)
    bias = bias.at[1, :, 0].set(-jnp.inf)
    query = query.at[:, :, 3].set(0).at[:, :, 3, 0].set(1e19)  # scaled by a half
    key = key.at[:, :, 3].set(3e19).at[:, 1, 3].set(-3e19)
    query = query.at[:, :, 4].set(0).at[:, :, 4, 0].set(1e30)  # both, by products
    key = key.at[:, :, 4].set(1e30).at[:, 0, 4].set(-1e30)
    found = jax.jit(mc.max_logits)(query, key, bias=bias)
    assert np.isfinite(found[:2]).all() and (found[:2] < 100).all()
    assert found[2] == -np.inf
    np.testing.assert_allclose(found[3], 1.5e38, rtol=1e-6)
    assert found[4] == np.inf


@pytest.mark.parametrize("route", ["max_logits", "blockwise"])
def test_a_nan_of_the_bias(route):
    query, key = qk(5)
    bias = jnp.zeros((3, 5, 5)).at[1, 2, 3].set(jnp.nan)
    assert np.isnan(ROUTES[route](query, key, bias=bias)).tolist() == [0, 1, 0]


def test_the_head_is_counted_and_left_alone():
    query, key = qk(70, heads=2)
    stats = {"attn": {"max_logits": mc.max_logits(query.at[0, 0, 1].set(jnp.nan), key)}}
    kernel = jnp.ones((8, 2, 4))
    params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
    tx = mc.qk_clip(1e-3)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    assert (int(state.num_nonfinite), int(state.num_clipped)) == (1, 1)
    for update in jax.tree.leaves(updates):
        assert (update[:, 0] < 0).all() and not update[:, 1].any()

"""The largest logits against those formed one by one in float64, whole and in blocks.

Blocks take memory that grows with the length alone. A NaN among the logits is counted;
XLA's maximum of many numbers loses it on CPU.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    are_unlike,
    bernoulli,
    differ,
    first_that,
    more,
    naive_logits,
    normal,
    one_at_a_time,
    query_and_key,
)
from internals import max_logits_module as module

import muonclip_jax as mc


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 4)
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", 0)


SHAPES = {
    "full": lambda t, s: (2, 4, t, s),
    "heads": lambda t, s: (1, 4, t, s),
    "one row": lambda t, s: (2, 1, 1, s),
    "one column": lambda t, s: (t, 1),
    "keys alone": lambda t, s: (s,),
}
LENGTHS = [(8, 8), (9, 11), (3, 10), (10, 3), (4, 5), (1, 13)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_blocks_equal_the_whole(small_blocks, lengths):
    query, key = qk(*lengths, key_heads=2)
    check(mc.max_logits(query, key), largest(query, key))


@pytest.mark.parametrize("shape, lengths", one_at_a_time(SHAPES, LENGTHS))
def test_mask_and_bias_in_blocks(small_blocks, lengths, shape):
    query, key = qk(*lengths, key_heads=2)
    size = SHAPES[shape](*lengths)
    bias = normal(2, *size)
    mask = first_that(
        lambda mask: differ(largest(query, key, mask), largest(query, key)),
        lambda seed: bernoulli(seed, 0.5, size),
    )
    expected = largest(query, key, mask)
    assert not mask.any() or differ(expected, largest(query, key, mask, bias), 1e-3)
    check(mc.max_logits(query, key, mask=mask, bias=bias), expected)


WINDOWS = {
    "causal": ({"is_causal": True}, lambda i, j: j <= i),
    "symmetric": ({"local_window_size": 2}, lambda i, j: abs(i - j) <= 2),
    "two-sided": ({"local_window_size": (3, 1)}, lambda i, j: -3 <= j - i <= 1),
    "to the end": ({"local_window_size": (-2, 2**40)}, lambda i, j: j - i >= 2),
    "beyond the start": ({"local_window_size": (None, -(2**40))}, lambda i, j: False),
    "causal window": (
        {"local_window_size": 3, "is_causal": True},
        lambda i, j: -3 <= j - i <= 0,
    ),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("blocks", [True, False])
def test_windows(window, blocks, request):
    if blocks:
        request.getfixturevalue("small_blocks")
    options, sees = WINDOWS[window]
    # Many heads, so that for some the largest logit is on the window's edge.
    query, key = qk(11, 11, heads=64, key_heads=64, batch=(1,))
    mask = np.asarray([[sees(i, j) for j in range(11)] for i in range(11)])
    check(mc.max_logits(query, key, **options), largest(query, key, mask))


def test_segments(small_blocks):
    query, key = qk(9, 11, key_heads=2)
    mine = np.asarray([[0, 0, 1, 1, 1, 2, 2, 3, 3], [0] * 5 + [1] * 4])
    theirs = np.asarray([[0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4], [1] * 6 + [0] * 5])
    # Not the query as a key: a product with itself is the largest, and is seen.
    for (query, key), ids in ((qk(9, 11, key_heads=2), theirs), (qk(9, 9), mine)):
        mask = (mine[:, :, None] == ids[:, None, :])[:, None]
        expected = largest(query, key, mask)
        assert not np.allclose(expected, largest(query, key), 0.01)
        found = mc.max_logits(query, key, query_segment_ids=mine, key_segment_ids=ids)
        check(found, expected)
    check(mc.max_logits(query, key, query_segment_ids=mine), expected)


def test_blocks_under_jit_grad_and_several_batch_axes(small_blocks):
    query, key = qk(9, 11, key_heads=2, batch=(2, 3))
    flat = [x.reshape(6, *x.shape[2:]) for x in (query, key)]
    check(jax.jit(mc.max_logits)(query, key), largest(*flat))
    gradient = jax.grad(lambda q: mc.max_logits(q, key).sum() + q.sum())(query)
    chex.assert_trees_all_equal(gradient, jnp.ones_like(query))


def test_memory_grows_with_the_length_and_not_its_square():
    def temporary(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

        def loss(q, k):
            return mc.max_logits(q, k, is_causal=True).sum() + q.sum()

        compiled = jax.jit(jax.grad(loss)).lower(shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 1.2 * temporary(4096) + 16384 * 2 * 16 * 4 * 4
    assert temporary(16384) < 16384**2 * 4 / 20


def qk(length=5, key_length=7, heads=4, key_heads=4, batch=(2,), depth=3):
    query = normal(0, *batch, length, heads, depth)
    return query, normal(1, *batch, key_length, key_heads, depth)


def largest(query, key, mask=None, added=0):
    """The largest logit of each head, in float64."""
    return (naive_logits(query, key, mask) + added).max(axis=(0, 2, 3))


def check(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_plain_and_shared_keys(key_heads):
    query, key = qk(key_heads=key_heads)
    expected = largest(query, key)
    assert are_unlike(expected)
    check(mc.max_logits(query, key), expected)


@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (2, 4, 5, 7), (1, 1, 5, 7), (5, 7)])
@pytest.mark.parametrize("dtype", [bool, jnp.float32])
def test_mask_hides_pairs(shape, dtype):
    query, key = qk()
    query, key = qk()
    mask = first_that(
        lambda mask: differ(largest(query, key, mask), largest(query, key)),
        lambda seed: bernoulli(seed, 0.3, shape),
    )
    found = mc.max_logits(query, key, mask=mask.astype(dtype))
    assert found.dtype == jnp.float32
    check(found, largest(query, key, mask))


def test_bias_and_scale():
    query, key = qk()
    bias = normal(4, 1, 4, 5, 7)
    expected = largest(query, key)
    assert differ(expected, largest(query, key, added=bias))
    check(mc.max_logits(query, key, bias=bias), expected)
    doubled = mc.max_logits(query, key, scale=2 / np.sqrt(3))
    check(doubled, 2 * mc.max_logits(query, key))


def test_bfloat16_logits_are_float32_and_nothing_visible_is_minus_infinity():
    query, key = (x.astype(jnp.bfloat16) for x in qk())
    found = mc.max_logits(query, key)
    assert found.dtype == jnp.float32
    check(found, largest(query.astype(jnp.float32), key.astype(jnp.float32)))
    assert (mc.max_logits(query, key, mask=jnp.zeros((5, 7))) == -jnp.inf).all()


def test_carries_no_gradient():
    query, key = qk()
    grads = jax.grad(lambda q, k: mc.max_logits(q, k).sum(), argnums=(0, 1))(query, key)
    assert all((g == 0).all() for g in grads)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"key heads must divide"):
        mc.max_logits(*qk(heads=4, key_heads=3))


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
SIZES = {"max_logits": (3, 65, 1100), "blockwise": (3, 65, 600), "splash": (128,)}
CASES = [(route, n) for route in ROUTES for n in SIZES.get(route, (3, 65))]


@pytest.mark.parametrize("jit", [True, more(False)])
@pytest.mark.parametrize("route, length", CASES)
def test_a_nan_of_one_head_reaches_its_statistic_alone(route, length, jit):
    query, key = qk(length, length, heads=3, key_heads=3, depth=4)
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
    query, key = qk(length, length, heads=3, key_heads=3, depth=4)
    window = {"is_causal": True, "local_window_size": 1}
    find = jax.jit(functools.partial(ROUTES[route], **window))
    # No query sees its key but the last one, of which the mask hides the batch.
    broken = key.at[1, length - 1, 2].set(jnp.nan)
    ids = jnp.ones((2, length), jnp.int32).at[1, length - 1].set(2)
    options = dict(query_segment_ids=ids, key_segment_ids=ids.at[1, -1].set(3))
    found, expected = (find(query, x, **options) for x in (broken, key))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [5, 300])
def test_infinities_stay_what_they_are(size):
    """A sum of both is NaN, and the largest float32 must not overflow in one."""
    query, key = qk(size, size, heads=5, key_heads=5, depth=4)
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
    query, key = qk(5, 5, heads=3, key_heads=3, depth=4)
    bias = jnp.zeros((3, 5, 5)).at[1, 2, 3].set(jnp.nan)
    assert np.isnan(ROUTES[route](query, key, bias=bias)).tolist() == [0, 1, 0]


def test_the_head_is_counted_and_left_alone():
    query, key = qk(70, 70, heads=2, key_heads=2, depth=4)
    stats = {"attn": {"max_logits": mc.max_logits(query.at[0, 0, 1].set(jnp.nan), key)}}
    params = {"attn": query_and_key(8, 2, 4)}
    tx = mc.qk_clip(1e-3)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    assert (int(state.num_nonfinite), int(state.num_clipped)) == (1, 1)
    for update in jax.tree.leaves(updates):
        assert (update[:, 0] < 0).all() and not update[:, 1].any()

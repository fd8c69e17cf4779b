"""Blocks give what the whole gives, in memory that grows with the length alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    bernoulli,
    differ,
    first_that,
    naive_logits,
    normal,
    one_at_a_time,
)
from internals import max_logits_module as module

import muonclip_jax as mc


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 4)
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", 0)


def qk(length, key_length, heads=4, key_heads=2, batch=(2,)):
    query = normal(0, *batch, length, heads, 3)
    return query, normal(1, *batch, key_length, key_heads, 3)


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
    query, key = qk(*lengths)
    expected = naive_logits(query, key).max(axis=(0, 2, 3))
    np.testing.assert_allclose(mc.max_logits(query, key), expected, rtol=1e-5)


@pytest.mark.parametrize("shape, lengths", one_at_a_time(SHAPES, LENGTHS))
def test_mask_and_bias_in_blocks(small_blocks, lengths, shape):
    query, key = qk(*lengths)
    t, s = lengths
    size = SHAPES[shape](t, s)
    bias = normal(2, *size)

    def largest(mask, added=0):
        return (naive_logits(query, key, mask) + added).max(axis=(0, 2, 3))

    mask = first_that(
        lambda mask: differ(largest(mask), largest(None)),
        lambda seed: bernoulli(seed, 0.5, size),
    )
    expected = largest(mask)
    assert not mask.any() or differ(expected, largest(mask, bias), 1e-3)
    np.testing.assert_allclose(
        mc.max_logits(query, key, mask=mask, bias=bias), expected, rtol=1e-5
    )


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
    expected = naive_logits(query, key, mask).max(axis=(0, 2, 3))
    np.testing.assert_allclose(
        mc.max_logits(query, key, **options), expected, rtol=1e-5
    )


def test_segments(small_blocks):
    query, key = qk(9, 11)
    mine = np.asarray([[0, 0, 1, 1, 1, 2, 2, 3, 3], [0] * 5 + [1] * 4])
    theirs = np.asarray([[0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4], [1] * 6 + [0] * 5])
    mask = (mine[:, :, None] == theirs[:, None, :])[:, None]
    expected = naive_logits(query, key, mask).max(axis=(0, 2, 3))
    actual = mc.max_logits(query, key, query_segment_ids=mine, key_segment_ids=theirs)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert not np.allclose(expected, naive_logits(query, key).max((0, 2, 3)), 0.01)
    # Not the query as a key: a product with itself is the largest, and is seen.
    query, key = qk(9, 9)
    own = (mine[:, :, None] == mine[:, None, :])[:, None]
    expected = naive_logits(query, key, own).max(axis=(0, 2, 3))
    assert not np.allclose(expected, naive_logits(query, key).max((0, 2, 3)), 0.01)
    np.testing.assert_allclose(
        mc.max_logits(query, key, query_segment_ids=mine), expected, rtol=1e-5
    )


def test_blocks_under_jit_grad_and_several_batch_axes(small_blocks):
    query, key = qk(9, 11, batch=(2, 3))
    flat = [x.reshape(6, *x.shape[2:]) for x in (query, key)]
    expected = naive_logits(*flat).max(axis=(0, 2, 3))
    np.testing.assert_allclose(jax.jit(mc.max_logits)(query, key), expected, rtol=1e-5)
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

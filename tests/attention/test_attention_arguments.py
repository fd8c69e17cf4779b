"""Masks, biases and segments: all that broadcast to the logits, and no others."""

import functools

import jax
import numpy as np
import pytest
from attention_references import draw, naive_attention, slope
from internals import max_logits_module as module

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

BLOCK = 4


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    before = module._BLOCK, module._PAIRS_AT_ONCE
    module._BLOCK = BLOCK
    yield
    module._BLOCK, module._PAIRS_AT_ONCE = before


def blockwise(*arrays, **options):
    return mc.blockwise_attention(*arrays, block_size=BLOCK, **options)


def largest(query, key, value, *, pairs, **options):
    module._PAIRS_AT_ONCE = pairs
    return None, mc.max_logits(query, key, **options)


FUNCTIONS = {
    "blockwise": blockwise,
    "whole": functools.partial(largest, pairs=1 << 20),
    "in blocks": functools.partial(largest, pairs=0),
}


def qkv(length, key_length, batch=(2,)):
    return draw(
        0,
        (*batch, length, 2, 3),
        (*batch, key_length, 1, 3),
        (*batch, key_length, 1, 3),
    )


def agree(function, arrays, options, mask, bias=None):
    output, statistic = FUNCTIONS[function](*arrays, **options)
    expected, exact = naive_attention(*arrays, mask=mask, bias=bias)
    np.testing.assert_allclose(statistic, exact, rtol=1e-5, atol=1e-6)
    if output is not None:
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ["blockwise", "whole", "in blocks", "splash"])
@pytest.mark.parametrize(
    "mine, theirs, wrong",
    [
        ((2, 4), (2, 9), "query_segment_ids"),
        ((3, 5), (2, 9), "query_segment_ids"),
        ((2, 5), (2, 8), "key_segment_ids"),
        ((2, 5), (1, 2, 9), "key_segment_ids"),
        ((2, 5), None, "query_segment_ids"),
        (None, (2, 9), "key_segment_ids"),
    ],
)
def test_segments_that_do_not_fit(function, mine, theirs, wrong):
    ids = [None if shape is None else np.zeros(shape, int) for shape in (mine, theirs)]
    call = mc.splash_attention if function == "splash" else FUNCTIONS[function]
    with pytest.raises(ValueError, match=wrong):
        call(*qkv(5, 9), query_segment_ids=ids[0], key_segment_ids=ids[1])


def test_gradient_of_all_that_broadcasts():
    """Sums over the axes that keys, bias and scale do not have."""
    shapes = [(2, 5, 2, 3), (1, 9, 1, 3), (9, 1, 3), (1, 2, 1, 9), ()]
    arrays, ways = draw(0, *shapes), draw(1, *shapes)
    weights = draw(2, (2, 5, 2, 3))[0]

    def loss(attention, *x):
        output, _ = attention(*x[:3], bias=x[3], scale=x[4])
        return (output * weights).sum()

    grads = jax.grad(functools.partial(loss, blockwise), range(5))(*arrays)
    expected = slope(functools.partial(loss, naive_attention), arrays, ways)
    actual = sum(np.vdot(g, w) for g, w in zip(grads, ways, strict=True))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_whole_numbers_of_numpy_and_traced_scales(function):
    arrays = qkv(5, 9)
    ahead = np.arange(9) - np.arange(5)[:, None]
    options = dict(local_window_size=(np.int64(2), np.uint8(1)))
    agree(function, arrays, options, (ahead >= -2) & (ahead <= 1))
    call = jax.jit(lambda scale: FUNCTIONS[function](*arrays, scale=scale)[1])
    at_once = FUNCTIONS[function](*arrays, scale=0.25)[1]
    np.testing.assert_allclose(call(0.25), at_once, rtol=1e-6)

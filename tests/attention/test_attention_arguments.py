"""Masks, biases and segments: all that broadcast to the logits, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_references import draw, naive_attention, slope
from helpers import few, more, one_at_a_time
from hypothesis import example, given, settings
from hypothesis import strategies as st
from internals import max_logits_module as module

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

BLOCK = 4
LENGTHS = st.sampled_from([(4, 8), (8, 4), (5, 9), (3, 3)])
shapes = st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 9]), max_size=5).map(tuple)


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


@pytest.mark.parametrize("function", few(FUNCTIONS, "in blocks"))
@pytest.mark.parametrize("name", ["bias", "mask"])
@settings(max_examples=12, deadline=None)
@example((5, 9), (4, 4))
@example((8, 4), (4, 4))
@example((5, 9), (4,))
@example((5, 9), (1, 2, 5, 9))
@example((5, 9), (2, 1, 1, 9))
@example((5, 9), (5, 1))
@example((3, 3), ())
@given(LENGTHS, shapes)
def test_a_shape_broadcasts_or_is_refused(function, name, lengths, shape):
    arrays, logits = qkv(*lengths), (2, 2, *lengths)
    try:
        fits = np.broadcast_shapes(shape, logits) == logits
    except ValueError:
        fits = False
    array = draw(1, shape)[0]
    if name == "mask":
        array = np.asarray(array > -0.5)
        if shape:
            array[..., 0] = True  # jax.nn averages for a query that sees nothing
    if fits:
        mask, bias = (array, None) if name == "mask" else (None, array)
        agree(function, arrays, {name: array}, mask, bias)
        return
    with pytest.raises(ValueError) as error:
        FUNCTIONS[function](*arrays, **{name: array})
    assert all(text in str(error.value) for text in (name, str(shape), str(logits)))


@pytest.mark.parametrize("function", ["blockwise", "whole", "in blocks"])
@pytest.mark.parametrize(
    "mine, theirs",
    [
        ((2, 5), (2, 9)),
        more((5,), (2, 9)),
        ((1, 5), (9,)),
        more((2, 1), None),
        ((), (1, 9)),
    ],
)
def test_segments_of_every_shape_that_broadcasts(function, mine, theirs):
    ids = [
        None if s is None else np.abs(draw(3, s)[0]).astype(int) for s in (mine, theirs)
    ]
    rows = np.broadcast_to(ids[0], (2, 5))
    columns = np.broadcast_to(ids[0] if theirs is None else ids[1], (2, 9))
    mask = rows[:, None, :, None] == columns[:, None, None, :]
    options = dict(query_segment_ids=ids[0], key_segment_ids=ids[1])
    agree(function, qkv(5, 9), options, mask)


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


@pytest.mark.parametrize(
    "batches, function",
    one_at_a_time([((2,), (1,)), ((1,), (2,)), ((2, 3), (3,)), ((), (2,))], FUNCTIONS),
)
def test_batch_axes_broadcast(function, batches):
    query, _, _ = qkv(5, 9, batches[0])
    _, key, value = qkv(5, 9, batches[1])
    agree(function, (query, key, value), {}, None)


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


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(block_size=0), "block_size"),
        (dict(block_size=2.0), "block_size"),
        (dict(local_window_size=(1, 2, 3)), "local_window_size"),
        (dict(local_window_size=1.5), "local_window_size"),
        (dict(scale=np.ones(2)), "scale"),
    ],
)
def test_numbers_that_are_none(options, match):
    with pytest.raises(ValueError, match=match):
        mc.blockwise_attention(*qkv(5, 9), **options)


def test_whole_numbers_are_known_to_the_compiler():
    arrays = qkv(5, 9)
    with pytest.raises(ValueError, match="block_size"):
        jax.jit(lambda n: mc.blockwise_attention(*arrays, block_size=n))(4)


def test_integers_are_no_queries():
    x = jnp.ones((1, 3, 1, 2), int)
    with pytest.raises(ValueError, match="query int32"):
        mc.blockwise_attention(x, x, x)

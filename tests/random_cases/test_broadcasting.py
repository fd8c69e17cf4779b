"""Masks, biases and segment ids of every shape that broadcasts, and of none other."""

import functools

import jax
import numpy as np
import pytest
from attention_references import naive_attention
from seeds import chance, family, pick, told

import muonclip_jax as mc


WIDTH = 2


def shape_that_broadcasts(generator, full):
    """Some axes of size one, and some in front left out."""
    sizes = [pick(generator, 1, size, size) for size in full]
    return tuple(sizes[generator.integers(len(full) + 1) :])


def shape_that_does_not(generator, full):
    """One size that is neither one nor right, or an axis too many."""
    sizes = list(full)
    if chance(generator, 0.2):
        return (2, *sizes)
    axis = generator.integers(len(sizes))
    wrong = {0, 2, 3, 4, 5, 8} - {sizes[axis]}
    sizes[axis] = pick(generator, *sorted(wrong))
    first = min(axis, generator.integers(len(sizes)))
    return tuple(sizes[first:])


def draw(generator):
    batch = pick(generator, (), (2,), (1,), (2, 2))
    heads, key_heads = pick(generator, (1, 1), (2, 1), (4, 2), (2, 2))
    queries, keys = pick(generator, (1, 1), (3, 4), (4, 4), (4, 5), (0, 3), (3, 0))
    # A batch of one sequence of keys serves all queries.
    key_batch = shape_that_broadcasts(generator, batch)
    shapes = {
        "query": (*batch, queries, heads, WIDTH),
        "key": (*key_batch, keys, key_heads, WIDTH),
        "value": (*key_batch, keys, key_heads, pick(generator, WIDTH, WIDTH, 3)),
    }
    full = {
        "bias": (*batch, heads, queries, keys),
        "mask": (*batch, heads, queries, keys),
        "query_segment_ids": (*batch, queries),
        "key_segment_ids": (*batch, keys),
    }
    given = {"bias": 0.5, "mask": 0.6, "query_segment_ids": 0.4, "key_segment_ids": 0.4}
    names = [name for name in full if chance(generator, given[name])]
    if "query_segment_ids" not in names:
        names = [name for name in names if name != "key_segment_ids"]
    elif queries != keys and "key_segment_ids" not in names:
        names.append("key_segment_ids")
    wrong = pick(generator, *names) if names and chance(generator, 0.4) else None
    for name in names:
        make = shape_that_does_not if name == wrong else shape_that_broadcasts
        shapes[name] = make(generator, full[name])
    options = {
        "is_causal": chance(generator, 0.3),
        "local_window_size": pick(generator, None, None, 1, (0, 2), (2, None)),
    }
    return shapes, wrong, options, pick(generator, 1, 2, 3, 16)


def arrays_of(generator, shapes):
    arrays = {}
    for name, shape in shapes.items():
        if name == "mask":
            arrays[name] = generator.random(shape) < 0.7
        elif name.endswith("ids"):
            arrays[name] = generator.integers(0, 2, shape).astype(np.int32)
        else:
            arrays[name] = generator.normal(size=shape).astype(np.float32)
    return arrays


def functions(shapes, options, block_size):
    """The entry points that take these arguments, by name."""
    blockwise = functools.partial(mc.blockwise_attention, block_size=block_size)
    found = {
        "blockwise_attention": functools.partial(blockwise, **options),
        "max_logits": lambda query, key, value, **arrays: mc.max_logits(
            query, key, **arrays, **options
        ),
    }
    if "query_segment_ids" not in shapes:
        fn = functools.partial(mc.attention_fn, kernel=blockwise)
        if options["local_window_size"] is None:
            found["attention_fn"] = functools.partial(
                fn, is_causal=options["is_causal"]
            )
    return found


def visible(arrays, options, full):
    """Which pairs may meet, `(batch..., heads, queries, keys)`."""
    i, j = np.arange(full[-2])[:, None], np.arange(full[-1])
    seen = np.broadcast_to(arrays.get("mask", True), full).copy()
    if options["is_causal"]:
        seen &= j <= i
    window = options["local_window_size"]
    before, after = window if isinstance(window, tuple) else (window, window)
    seen &= (before is None) | (i - j <= (before or 0))
    seen &= (after is None) | (j - i <= (after or 0))
    if "query_segment_ids" in arrays:
        rows = (*full[:-3], full[-2])
        of_query = np.broadcast_to(arrays["query_segment_ids"], rows)
        columns = (*full[:-3], full[-1])
        of_key = arrays.get("key_segment_ids", arrays["query_segment_ids"])
        of_key = np.broadcast_to(of_key, columns)
        seen &= (of_query[..., :, None] == of_key[..., None, :])[..., None, :, :]
    return seen


def compare(name, result, expected):
    output, largest = expected
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    if name == "max_logits":
        return close(result, largest)
    if name == "attention_fn":
        return close(result, output)
    close(result[0], output)
    return close(result[1], largest)


def check(seed):
    generator = np.random.default_rng(seed)
    shapes, wrong, options, block_size = draw(generator)
    arrays = arrays_of(generator, shapes)
    found = functions(shapes, options, block_size)
    with told(seed, shapes=shapes, wrong=wrong, options=options, block=block_size):
        if wrong:
            for function in found.values():
                with pytest.raises(ValueError, match="broadcast"):
                    jax.eval_shape(function, **arrays)
            return
        run = jax.jit(lambda arrays: {n: f(**arrays) for n, f in found.items()})
        full = np.broadcast_shapes(shapes["query"][:-3], shapes["key"][:-3])
        full += (*shapes["query"][-2:-4:-1], shapes["key"][-3])
        qkv = (arrays[name] for name in ("query", "key", "value"))
        mask = visible(arrays, options, full)
        expected = naive_attention(*qkv, bias=arrays.get("bias"), mask=mask)
        for name, result in run(arrays).items():
            compare(name, result, expected)


test_broadcasting = family(check, 200)

"""A stack of matrices, some batches at a time."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


#: From batches `(..., m, n)`, which it may take in turns, to as many results.
OfBatches = Callable[..., Sequence[jax.Array]]


def map_batches(
    function: OfBatches,
    stack: jax.Array,
    max_entries: int,
    *,
    turns: int = 1,
    most_unrolled: int = 1,
) -> jax.Array:
    """Applies `function` to batches of `(count, m, n)`, `turns` of them at a time.

    A batch holds at least one matrix and otherwise at most `max_entries` entries.
    Batches are of equal size as far as the count allows. Up to `most_unrolled` of them
    are written out, which saves a copy of each into a loop and out of it.
    """
    count, *shape = stack.shape
    largest = most_matrices(shape, max_entries)
    batches = max(1, _divide_up(count, largest))
    if count < 2 or (batches == 1 and turns == 1):
        return function(stack)[0]
    if batches <= most_unrolled:
        parts = jnp.array_split(stack, batches)
        return jnp.concatenate([result for x in parts for result in function(x)])
    size = _divide_up(count, turns * _divide_up(batches, turns))
    return _map_in_place(function, stack, size, turns)


def map_first(
    function: OfBatches,
    stack: jax.Array,
    max_entries: int,
    count: jax.Array,
    zero: jax.Array,
    *,
    turns: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """`map_batches` for the first `count` matrices, a number known only at run time.

    The remaining matrices are undefined. The result has the dtype of the stack. `zero`
    is 0, as is the number that comes back, but the compiler does not know it: the work
    begins after whatever made the one, and ends before whatever needs the other.
    """
    slots, done = len(stack), 0
    size = batch_size(stack.shape, max_entries)
    together = size_in_turns(stack.shape, max_entries, turns)
    stack = jnp.pad(stack, [(0, -slots % size), (0, 0), (0, 0)])
    if together > size:
        trips = count // together
        with jax.named_scope("in_turns"):
            stack, zero = _map_trips(function, stack, done, trips, zero, [size] * turns)
        done = trips * together
    trips = (count - done + size - 1) // size
    stack, zero = _map_trips(function, stack, done, trips, zero, _cut(size, turns))
    return stack[:slots], zero


def batch_size(shape: tuple[int, ...], max_entries: int) -> int:
    """How many matrices of a stack `map_first` takes at once."""
    slots, *matrix = shape
    return min(slots, most_matrices(matrix, max_entries))


def size_in_turns(shape: tuple[int, ...], max_entries: int, turns: int) -> int:
    """How many it takes as long as there are enough: batches too small to be cut."""
    size = batch_size(shape, max_entries)
    return turns * size if size < turns and turns * size <= shape[0] else size


def _map_trips(
    function: OfBatches, stack: jax.Array, start, trips, zero: jax.Array, sizes
) -> tuple[jax.Array, jax.Array]:
    """As many trips of a loop, from a matrix on, with batches of `sizes` in each."""

    def body(carry):
        i, stack = carry
        return i + 1, _replace(function, stack, start + i * sum(sizes), sizes)

    last, stack = jax.lax.while_loop(lambda x: x[0] < trips, body, (zero, stack))
    return stack, last - trips


def _map_in_place(
    function: OfBatches, stack: jax.Array, size: int, turns: int
) -> jax.Array:
    """Results take the places of what they were made of: there is one stack."""
    count, *shape = stack.shape
    batch = jax.ShapeDtypeStruct((size, *shape), stack.dtype)
    results = stack.astype(jax.eval_shape(function, batch)[0].dtype)

    def of_stored(*batches):
        return function(*[x.astype(stack.dtype) for x in batches])

    def body(i, results):
        return _replace(of_stored, results, i * sum(sizes), sizes)

    sizes = [size] * turns
    trips, rest = divmod(count, sum(sizes))
    results = jax.lax.fori_loop(0, trips, body, results)
    return _replace(of_stored, results, count - rest, _cut(rest, turns))


def _replace(
    function: OfBatches, stack: jax.Array, start: jax.Array | int, sizes: Sequence[int]
) -> jax.Array:
    """Consecutive batches of a stack replaced by what the function makes of them."""
    starts = [start + int(before) for before in np.cumsum(sizes) - sizes]
    batches = [
        jax.lax.dynamic_slice_in_dim(stack, first, size)
        for first, size in zip(starts, sizes, strict=True)
    ]
    if not batches:
        return stack
    for first, result in zip(starts, function(*batches), strict=True):
        result = result.astype(stack.dtype)
        stack = jax.lax.dynamic_update_slice_in_dim(stack, result, first, 0)
    return stack


def _cut(count: int, turns: int) -> list[int]:
    """The sizes of the batches of as many matrices."""
    return [len(part) for part in np.array_split(range(count), turns) if len(part)]


def most_matrices(shape: Sequence[int], max_entries: int) -> int:
    """How many matrices of a shape make a batch."""
    return max(1, max_entries // max(1, math.prod(shape)))


def _divide_up(x: int, y: int) -> int:
    return -(-x // y)

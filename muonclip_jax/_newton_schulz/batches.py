"""A stack of matrices, a batch at a time."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def map_batches(
    function: Callable[[jax.Array], jax.Array],
    stack: jax.Array,
    max_entries: int,
    most_unrolled: int = 1,
) -> jax.Array:
    """Applies `function`, `(..., m, n)` to the same, to batches of `(count, m, n)`.

    A batch holds at least one matrix and otherwise at most `max_entries` entries.
    Batches are of equal size as far as the count allows. Up to `most_unrolled` of them
    are written out, which saves a copy of each into a loop and out of it.
    """
    count, *shape = stack.shape
    largest = _most_matrices(shape, max_entries)
    # A product with a batch axis of one is slower than one without.
    if count == 1:
        return function(stack[0])[None]
    if count <= largest:
        return function(stack)
    batches = _divide_up(count, largest)
    if batches <= most_unrolled:
        return jnp.concatenate([*map(function, jnp.array_split(stack, batches))])
    if largest == 1:
        return jax.lax.map(function, stack)
    return jax.lax.map(function, stack, batch_size=_divide_up(count, batches))


def map_first(
    function: Callable[[jax.Array], jax.Array],
    stack: jax.Array,
    max_entries: int,
    count: jax.Array,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`map_batches` for the first `count` matrices, a number known only at run time.

    The remaining matrices are undefined. The result has the dtype of the stack. `zero`
    is 0, as is the number that comes back, but the compiler does not know it: the work
    begins after whatever made the one, and ends before whatever needs the other.
    """
    slots = len(stack)
    size = batch_size(stack.shape, max_entries)
    padded = jnp.pad(stack, [(0, -slots % size), (0, 0), (0, 0)])
    batches = (count + size - 1) // size

    def body(carry):
        i, stack = carry
        batch = jax.lax.dynamic_slice_in_dim(stack, i * size, size)
        result = function(batch) if size > 1 else function(batch[0])[None]
        result = result.astype(stack.dtype)
        stack = jax.lax.dynamic_update_slice_in_dim(stack, result, i * size, 0)
        return i + 1, stack

    last, result = jax.lax.while_loop(lambda x: x[0] < batches, body, (zero, padded))
    return result[:slots], last - batches


def batch_size(shape: tuple[int, ...], max_entries: int) -> int:
    """How many matrices of a stack `map_first` takes at once."""
    slots, *matrix = shape
    return min(slots, _most_matrices(matrix, max_entries))


def _most_matrices(shape: Sequence[int], max_entries: int) -> int:
    return max(1, max_entries // max(1, math.prod(shape)))


def _divide_up(x: int, y: int) -> int:
    return -(-x // y)

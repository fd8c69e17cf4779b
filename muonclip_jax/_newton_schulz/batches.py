"""A stack of matrices a chunk at a time."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def map_chunks(
    function: Callable[[jax.Array], jax.Array], stack: jax.Array, chunk_size: int
) -> jax.Array:
    """Applies `function`, `(..., m, n)` to the same, to chunks of `(count, m, n)`.

    A chunk holds at least one matrix and otherwise at most `chunk_size` entries. Chunks
    are of equal size as far as the count allows.
    """
    count, *shape = stack.shape
    largest = _largest(shape, chunk_size)
    # A product with a batch axis of one is slower than one without.
    if count == 1:
        return function(stack[0])[None]
    if count <= largest:
        return function(stack)
    if largest == 1:
        return jax.lax.map(function, stack)
    size = _divide_up(count, _divide_up(count, largest))
    return jax.lax.map(function, stack, batch_size=size)


def map_first(
    function: Callable[[jax.Array], jax.Array],
    stack: jax.Array,
    chunk_size: int,
    count: jax.Array,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`map_chunks` for the first `count` matrices, known only when it runs.

    What becomes of the others is not said. The result has the dtype of the stack.
    `zero` is 0, as is the number that comes back, but the compiler does not know it:
    the work begins after whatever made the one, and ends before whatever needs the
    other.
    """
    slots = len(stack)
    size = size_of_chunks(stack.shape, chunk_size)
    padded = jnp.pad(stack, [(0, -slots % size), (0, 0), (0, 0)])
    chunks = (count + size - 1) // size

    def body(carry):
        i, stack = carry
        chunk = jax.lax.dynamic_slice_in_dim(stack, i * size, size)
        result = function(chunk) if size > 1 else function(chunk[0])[None]
        result = result.astype(stack.dtype)
        stack = jax.lax.dynamic_update_slice_in_dim(stack, result, i * size, 0)
        return i + 1, stack

    last, result = jax.lax.while_loop(lambda x: x[0] < chunks, body, (zero, padded))
    return result[:slots], last - chunks


def size_of_chunks(shape: tuple[int, ...], chunk_size: int) -> int:
    """How many matrices of a stack `map_first` takes at once."""
    slots, *matrix = shape
    return min(slots, _largest(matrix, chunk_size))


def _largest(shape: Sequence[int], chunk_size: int) -> int:
    return max(1, chunk_size // max(1, math.prod(shape)))


def _divide_up(x: int, y: int) -> int:
    return -(-x // y)

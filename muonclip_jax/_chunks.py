"""A stack of matrices a chunk at a time."""

import math
from collections.abc import Callable

import jax


def map_chunks(
    function: Callable[[jax.Array], jax.Array], stack: jax.Array, chunk_bytes: int
) -> jax.Array:
    """Applies `function`, `(..., m, n)` to the same, to chunks of `(count, m, n)`.

    A chunk holds at least one matrix and otherwise at most `chunk_bytes`. Chunks are
    of equal size as far as the count allows.
    """
    count, *shape = stack.shape
    matrix_bytes = math.prod(shape) * stack.dtype.itemsize
    largest = max(1, chunk_bytes // max(1, matrix_bytes))
    if count <= largest:
        return function(stack)
    if largest == 1:
        # A product with a batch axis of one is slower than one without.
        return jax.lax.map(function, stack)
    size = _divide_up(count, _divide_up(count, largest))
    return jax.lax.map(function, stack, batch_size=size)


def _divide_up(x: int, y: int) -> int:
    return -(-x // y)

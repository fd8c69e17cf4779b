"""A stack of matrices a chunk at a time."""

import math
from collections.abc import Callable

import jax


def map_chunks(
    function: Callable[[jax.Array], jax.Array], stack: jax.Array, chunk_size: int
) -> jax.Array:
    """Applies `function`, `(..., m, n)` to the same, to chunks of `(count, m, n)`.

    A chunk holds at least one matrix and otherwise at most `chunk_size` entries. Chunks
    are of equal size as far as the count allows.
    """
    count, *shape = stack.shape
    largest = max(1, chunk_size // max(1, math.prod(shape)))
    # A product with a batch axis of one is slower than one without.
    if count == 1:
        return function(stack[0])[None]
    if count <= largest:
        return function(stack)
    if largest == 1:
        return jax.lax.map(function, stack)
    size = _divide_up(count, _divide_up(count, largest))
    return jax.lax.map(function, stack, batch_size=size)


def _divide_up(x: int, y: int) -> int:
    return -(-x // y)

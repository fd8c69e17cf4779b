"""The order of work that data leave open: iterations in turns, and ordering tokens.

XLA orders operations by their data alone, and else as it thinks best. Two orders are
worth being asked for.
"""

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp


_Result = TypeVar("_Result")

#: Yields each array that it stores, is sent the same back, and returns its result.
Iteration = Generator[jax.Array, Any, _Result]


def take_turns(iterations: Sequence[Iteration[_Result]]) -> list[_Result]:
    """Runs iterations of equal length, of which none goes on before all have stored.

    Every product needs the one before, so while one runs nothing can be fetched for the
    next. Of two iterations in turns, one has its factors brought into fast memory while
    the other multiplies: by the compiler's estimates for TPU, GPT-2's update takes 0.79
    of the cycles and a quarter of the temporaries (`benchmarks/tpu_ahead_of_time.py`).
    """
    stored: list[Any] = [None] * len(iterations)  # a generator starts with None
    results: list[_Result] = []
    while not results:
        after, stored = stored, []
        for iteration, value in zip(iterations, after, strict=True):
            try:
                stored.append(iteration.send(value))
            except StopIteration as end:
                results.append(end.value)
        # Left to itself, a compiler runs one iteration after the other, or all at once
        # in as much memory; after a barrier of what all store they keep step.
        if len(stored) > 1:
            stored = list(jax.lax.optimization_barrier(stored))
    return results


def zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """0, but known only when all arrays are there: an ordering token."""
    # Data, since XLA drops optimization barriers before it puts operations in order.
    # Of any number `isnan` is 0 or 1, and the minimum with 0 is 0, which XLA does not
    # see through.
    numbers = [jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)


def wait_for(zero: jax.Array, x: jax.Array) -> jax.Array:
    """The same array, but whole only when the zero is known."""
    # One entry waits for it, in place: a sum with all of them would be a copy.
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)

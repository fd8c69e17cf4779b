"""Iterations that take turns.

Every product needs the one before, so while one runs nothing can be fetched for the
next. Of two iterations in turns, one has its factors brought into fast memory while the
other multiplies.
"""

from collections.abc import Generator, Iterable
from typing import Any

import jax


#: An iteration yields each thing that it stores, is sent the same behind a barrier, and
#: returns its result.
Iteration = Generator[Any, Any, Any]


def take_turns(iterations: Iterable[Iteration]) -> list[Any]:
    """Runs iterations of equal length, of which none goes on before all have stored."""
    iterations, results = list(iterations), []
    stored = [next(iteration) for iteration in iterations]
    while not results:
        if len(iterations) > 1:
            stored = jax.lax.optimization_barrier(stored)
        after, stored = stored, []
        for iteration, value in zip(iterations, after, strict=True):
            try:
                stored.append(iteration.send(value))
            except StopIteration as end:
                results.append(end.value)
    return results

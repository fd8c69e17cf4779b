"""Where the Gram form of Newton-Schulz has to start afresh."""

import functools
import itertools

import numpy as np

from .coefficients import Schedule


#: The most that one pass may grow the rounding error of R = X X^T, in units of that of
#: an entry of 1: the first pass, and a later one. The squares of the singular values of
#: X add up to 1 before the first step, so that if many count each is far below 1, and
#: so is the error that the first pass starts with. The Gram form then stays within
#: twice the error of the standard one in bfloat16 whatever the spectrum, and within
#: 1e-5 of it in float32 (`benchmarks/accuracy.py`). Keller's five start afresh after
#: the third step, in bfloat16 after the first and the third.
GROWTH = {"bfloat16": (60.0, 60.0)}
DEFAULT_GROWTH = (200.0, 70.0)


@functools.lru_cache(maxsize=256)
def cut_into_passes(schedule: Schedule, dtype: str) -> tuple[Schedule, ...]:
    """Cuts a schedule into passes that each start from `X X^T`, as few as will do.

    In exact arithmetic that is one. But R is rounded as the square of X: where a step
    of slope `a` lifts the error of X by `a`, it lifts that of R by `a^2`.
    """
    first, later = GROWTH.get(dtype, DEFAULT_GROWTH)
    largest = _largest_squares(schedule)
    cuts = [len(schedule)]
    while cuts[0] > 0:
        start, end = cuts[0] - 1, cuts[0]
        while start:
            most = first if start == 1 else later
            if _growth(schedule, largest, start - 1, end) > most:
                break
            start -= 1
        cuts.insert(0, start)
    return tuple(schedule[i:j] for i, j in itertools.pairwise(cuts))


def _growth(schedule: Schedule, largest: list[float], start: int, end: int) -> float:
    """The error of R, for a singular value of 0, in the last step of a pass."""
    error = largest[start]
    for (a, _, _), square in zip(
        schedule[start : end - 1], largest[start + 1 : end], strict=True
    ):
        error = a * a * error + square
    return error


def _largest_squares(schedule: Schedule) -> list[float]:
    """The largest eigenvalue that R can have before each step."""
    values, squares = np.linspace(0.0, 1.0, 4097), []
    for a, b, c in schedule:
        squares.append(float(np.max(values**2)))
        values = a * values + b * values**3 + c * values**5
    return squares

"""Rigorous bounds on what a schedule of odd quintics makes of singular values.

The range of one step over an interval is attained at its ends or at the extrema in it,
and so is known exactly. Intervals are pushed through step by step; many short ones
together lose almost nothing over the range of the whole composition.
"""

from collections.abc import Iterable

import numpy as np


Triple = tuple[float, float, float]
Intervals = tuple[np.ndarray, np.ndarray]  # their lower and their upper ends


def image(intervals: Intervals, schedule: Iterable[Triple]) -> Intervals:
    """Encloses the values of the composed polynomial on every interval."""
    # What grows beyond float64 becomes inf or nan, which no comparison calls small.
    with np.errstate(over="ignore", invalid="ignore"):
        for step in schedule:
            intervals = _step_image(intervals, step)
    return intervals


def _step_image(intervals: Intervals, step: Triple) -> Intervals:
    a, b, c = step
    low, high = intervals
    # An extremum outside moves to the nearer end, which is a candidate anyway.
    candidates = [low, high] + [np.clip(x, low, high) for x in _extrema(step)]
    values = np.stack([a * x + b * x**3 + c * x**5 for x in candidates])
    x = np.maximum(np.abs(low), np.abs(high))
    terms = abs(a) * x + abs(b) * x**3 + abs(c) * x**5
    rounding = 8 * np.finfo(np.float64).eps * terms
    return values.min(axis=0) - rounding, values.max(axis=0) + rounding


def _extrema(step: Triple) -> list[float]:
    """The roots of the derivative `a + 3 b x^2 + 5 c x^4`.

    Where they are complex their real parts take their place: any point of an interval
    may be a candidate.
    """
    a, b, c = step
    roots = [np.sqrt(abs(square.real)) for square in np.roots([5 * c, 3 * b, a])]
    return roots + [-root for root in roots]

"""A walk over a grid to a place without a better neighbor: how all rates are tuned."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar


Place = TypeVar("Place")


def walk(
    start: Place,
    next_to: Callable[[Place], Iterable[Place]],
    losses: Callable[[list[Place]], Sequence[float]],
    rounds: int | None = None,
) -> Place:
    """Goes to the best neighbor as long as it is better than where it stands.

    So the place where it ends is bracketed along every axis, unless it ends after so
    many `rounds`.
    """
    for _ in itertools.count() if rounds is None else range(rounds):
        places = [start, *next_to(start)]
        found = list(losses(places))
        best = places[found.index(min(found))]
        if best == start:
            break
        start = best
    return start


def neighbors(values: Sequence[float], value: float) -> list[float]:
    """The next smaller and the next larger one, where there are such."""
    i = values.index(value)
    return [*values[max(0, i - 1) : i], *values[i + 1 : i + 2]]

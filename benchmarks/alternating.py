"""Times callables in turn, so that a load that lasts falls on all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


Sides = Mapping[str, Callable[[], Any]]
Times = Mapping[str, list[float]]


def alternate(sides: Sides, repeats: int) -> Times:
    """Runs all sides once to compile, then times them, every other round backwards."""
    for run in sides.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats):
        for name in list(sides)[:: -1 if i % 2 else 1]:
            times[name].append(_seconds(sides[name]))
    return times


def ratio(times: Times, above: str, below: str) -> float:
    """The median of the ratios of neighbors."""
    return statistics.median(ratios(times, above, below))


def ratios(times: Times, above: str, below: str) -> list[float]:
    pairs = zip(times[above], times[below], strict=True)
    return [a / b for a, b in pairs]


def compare(times: Times, ours: str, peer: str) -> tuple[float, float, float]:
    """Both medians in seconds, and how many times faster `ours` is."""
    medians = [statistics.median(times[name]) for name in (ours, peer)]
    return medians[0], medians[1], ratio(times, peer, ours)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start

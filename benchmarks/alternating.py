"""Times callables in turn, so that a load that lasts falls on all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


Sides = Mapping[str, Callable[[], Any]]
Times = Mapping[str, list[float]]
CLOCKS = (time.perf_counter, time.process_time)


def alternate(sides: Sides, repeats: int) -> Times:
    """Runs all sides once to compile, then times them, every other round backwards."""
    return by_both_clocks(sides, repeats)[0]


def by_both_clocks(sides: Sides, repeats: int) -> list[Times]:
    """The same on the wall, and of the processors: other load counts little there."""
    for run in sides.values():
        jax.block_until_ready(run())
    times: list[dict[str, list[float]]] = [{k: [] for k in sides} for _ in CLOCKS]
    for i in range(repeats):
        for name in list(sides)[:: -1 if i % 2 else 1]:
            for of_clock, seconds in zip(times, _seconds(sides[name]), strict=True):
                of_clock[name].append(seconds)
    return [*times]


def ratio(times: Times, above: str, below: str) -> float:
    """The median of the ratios of neighbors."""
    return statistics.median(ratios(times, above, below))


def ratios(times: Times, above: str, below: str) -> list[float]:
    pairs = zip(times[above], times[below], strict=True)
    return [a / b for a, b in pairs]


def compare(times: Times, ours: str, *peers: str) -> tuple[float, ...]:
    """All medians in seconds, and how many times faster `ours` is than each peer."""
    medians = [statistics.median(times[name]) for name in (ours, *peers)]
    return *medians, *(ratio(times, peer, ours) for peer in peers)


def _seconds(run: Callable[[], Any]) -> list[float]:
    starts = [clock() for clock in CLOCKS]
    jax.block_until_ready(run())
    return [clock() - start for clock, start in zip(CLOCKS, starts, strict=True)]

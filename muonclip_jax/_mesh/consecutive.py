"""Which consecutive matrices of each stack a device of a mesh iterates.

Matrices that stay in order reach their devices by padding. To take them in any other
order would be a gather, which XLA does not partition well.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .ownership import MOST_SLOTS


class Consecutive(NamedTuple):
    """The matrices of a stack in the slots of all devices, one device after another."""

    first: int  # slot of the first matrix
    counts: np.ndarray  # matrices of each device
    slots: int  # of each device

    @property
    def padding(self) -> tuple[int, int]:
        """Empty slots in front of the matrices and behind them."""
        behind = len(self.counts) * self.slots - self.first - int(self.counts.sum())
        return self.first, behind


def assign_consecutive(
    counts: Sequence[int], costs: Sequence[float], devices: int
) -> list[Consecutive]:
    """Gives each stack, that of the most expensive matrices first, to idle devices."""
    loads, found = np.zeros(devices), {}
    costs = [float(cost) for cost in costs]
    for i in sorted(range(len(counts)), key=lambda i: -costs[i]):
        least = math.ceil(counts[i] / devices)
        candidates = [
            _where_least_busy(loads, counts[i], slots)
            for slots in (least, MOST_SLOTS * least)
        ]
        all_loads = [loads + costs[i] * chosen.counts for chosen in candidates]
        best = int(np.argmin([x.max() for x in all_loads]))
        found[i], loads = candidates[best], all_loads[best]
    return [found[i] for i in range(len(counts))]


def _where_least_busy(loads: np.ndarray, count: int, slots: int) -> Consecutive:
    used = math.ceil(count / slots)
    busiest = np.lib.stride_tricks.sliding_window_view(loads, used).max(axis=1)
    start = int(np.argmin(busiest))
    counts = np.zeros(len(loads), np.int32)
    counts[start : start + used] = slots
    counts[start + used - 1] = count - (used - 1) * slots
    return Consecutive(start * slots, counts, slots)

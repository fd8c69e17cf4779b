"""Which steps of a run are loss spikes, by a rule."""

from collections.abc import Sequence

import numpy as np


BEFORE, LIMIT = 50, 6.0
_SCALE = 1.4826  # of a median absolute deviation to a standard deviation


def spikes(losses: Sequence[float]) -> list[int]:
    """Steps whose loss is `LIMIT` deviations above the median of those before.

    Steps in a row count once. The deviation is the median absolute one, scaled to be a
    normal distribution's standard deviation.
    """
    if len(losses) <= BEFORE:
        return []
    before = np.lib.stride_tricks.sliding_window_view(losses, BEFORE)[:-1]
    middle = np.median(before, axis=1)
    deviation = _SCALE * np.median(np.abs(before - middle[:, None]), axis=1)
    # A NaN is one too.
    found = ~(np.asarray(losses[BEFORE:]) <= middle + LIMIT * deviation)
    first = found & ~np.concatenate([[False], found[:-1]])
    return (BEFORE + np.flatnonzero(first)).tolist()


WINDOW, ABOVE = 201, 0.1  # of the stress test


def stress_spikes(losses: Sequence[Sequence[float]]) -> np.ndarray:
    """How many steps of each run are above its rolling median by more than a bound.

    `losses` are of runs that saw the same batches, `(runs, steps)`; those that stopped
    early are shorter. The rule is that of Qwen's stress test, with one difference:
    their batches are so large that all are alike. Here a hard batch alone moves the
    loss by more than the bound, and moves it in all runs; so what the median run shows
    at a step is the batch's, and only what a run shows on top is its own. Steps without
    the whole window around them are not counted.
    """
    longest = max(map(len, losses))
    if longest < WINDOW:
        return np.zeros(len(losses), int)
    padded = np.full((len(losses), longest), np.inf)  # a run that stopped is lost
    for row, of_run in zip(padded, losses, strict=True):
        row[: len(of_run)] = np.nan_to_num(of_run, nan=np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=1)
    middle = np.median(windows, axis=-1)
    half = WINDOW // 2
    inside = padded[:, half : longest - half]
    # Once the median itself is infinite there is nothing left to be above of.
    lost = np.isinf(middle)
    above = np.where(lost, np.inf, inside - np.where(lost, 0.0, middle))
    batch = np.median(above, axis=0)
    return (above - np.where(np.isinf(batch), 0.0, batch) > ABOVE).sum(axis=1)


def stress_steps(steps: int) -> int:
    """How many steps of a run `stress_spikes` counts."""
    return max(0, steps - WINDOW + 1)

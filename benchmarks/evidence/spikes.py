"""Which steps of a run are loss spikes, by a rule."""

from collections.abc import Sequence

import numpy as np


BEFORE, LIMIT = 50, 6.0
_SCALE = 1.4826  # of a median absolute deviation to a standard deviation


def spikes(losses: Sequence[float]) -> list[int]:
    """Steps whose loss lies `LIMIT` deviations above the median of those before.

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

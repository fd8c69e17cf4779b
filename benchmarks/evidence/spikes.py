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
    found = []
    for i in range(BEFORE, len(losses)):
        before = np.asarray(losses[i - BEFORE : i])
        middle = np.median(before)
        deviation = _SCALE * np.median(np.abs(before - middle))
        if not losses[i] <= middle + LIMIT * deviation:  # a NaN is one too
            found.append(i)
    return [i for i in found if i - 1 not in found]

"""Names and colours of what the figures compare."""

from typing import Any

import numpy as np
from report import COLORS as COLORS
from report import NAMES as NAMES

from .intervals import interval


CYCLE = ("#d95f02", "#1b7fbd", "#1b9e77", "#7570b3", "#777777", "#e7298a", "#a6761d")


def band(axes: Any, x: Any, curves: Any, *, color: str, label: str) -> None:
    """The mean of curves, one for each seed, with its 95 % interval."""
    points = [interval(values) for values in np.transpose(curves)]
    axes.plot(x, [p.mean for p in points], color=color, label=label, linewidth=1.4)
    low, high = [p.low for p in points], [p.high for p in points]
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)

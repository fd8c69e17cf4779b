"""Colors and marks of what the figures compare."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .intervals import Interval, interval


CYCLE = ("#d95f02", "#1b7fbd", "#1b9e77", "#7570b3", "#777777", "#e7298a", "#a6761d")


def band(axes: Any, x: Any, curves: Any, *, color: str, label: str) -> None:
    """The mean of curves, one for each seed, with its 95 % interval."""
    points = [interval(values) for values in np.transpose(curves)]
    axes.plot(x, [p.mean for p in points], color=color, label=label, linewidth=1.4)
    low, high = [p.low for p in points], [p.high for p in points]
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def rows(
    axes: Any,
    means: Mapping[str, Interval],
    *,
    color: str,
    label: str = "",
    shift: float = 0.0,
) -> None:
    """Named means with their intervals, one below the other."""
    for i, of in enumerate(means.values()):
        named = dict(label=label) if label and not i else {}
        axes.errorbar(of.mean, shift - i, xerr=of.half, fmt="o", color=color, **named)
    axes.set_yticks([-i for i in range(len(means))], list(means), fontsize=9.5)


def losses_over(axes: Any, means: Mapping[str, Interval]) -> None:
    """Rows of losses over another's."""
    rows(axes, means, color=CYCLE[1])
    around_zero(axes)


def around_zero(axes: Any) -> None:
    axes.axvline(0, color="black", linewidth=0.8)
    axes.locator_params(axis="x", nbins=5)  # numbers of small losses are long

"""One look for the pictures of the benchmarks."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation


@contextlib.contextmanager
def picture(file: Path, **settings: Any) -> Iterator[Axes]:
    """Axes to draw on, saved at the end; `settings` are those of `Axes.set`."""
    with panels(file, [""], **settings) as axes:
        yield axes[0]


@contextlib.contextmanager
def panels(
    file: Path, titles: Sequence[str], *, rows: int = 1, **settings: Any
) -> Iterator[list[Axes]]:
    """Several axes, two in a row at most; `settings` are those of each.

    `rows` are how many belong together: two rows of three are two columns of three.
    A page shows two of them with labels of 11 pixels or more, three with smaller ones.
    """
    together = -(-len(titles) // rows)
    is_turned = together > 2 == rows
    columns = min(2, together)
    down = -(-len(titles) // columns)
    figure, grid = plt.subplots(
        down,
        columns,
        figsize=(4.6 * columns, 3.8 * down),
        layout="constrained",
        squeeze=False,
    )
    axes = list((grid.T if is_turned else grid).flat)
    for unused in axes[len(titles) :]:
        unused.remove()
    axes = axes[: len(titles)]
    for one, title in zip(axes, titles, strict=True):
        one.set(**settings)
        one.set_title(title, loc="left", fontsize=11)
    yield axes
    labeled = [one for one in axes if one.get_legend_handles_labels()[1]]
    if len(labeled) > 1:
        add_common_legend(figure, labeled)
    for one in axes:
        if labeled == [one]:
            one.legend(frameon=False)
        for axis in (one.xaxis, one.yaxis):
            # Numbers in place of powers of ten, whose exponents are too small to read.
            if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
                axis.set_major_formatter("{x:g}")
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def add_common_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend below all panels, where it hides nothing."""
    by_label = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        by_label |= dict(zip(labels, handles, strict=True))
    figure.legend(
        by_label.values(),
        by_label.keys(),
        loc="outside lower center",
        ncols=min(len(by_label), 5),
        frameon=False,
    )

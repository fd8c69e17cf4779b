"""One look for the pictures of the benchmarks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes


@contextlib.contextmanager
def picture(file: Path, **settings: Any) -> Iterator[Axes]:
    """Axes to draw on, saved at the end; `settings` are those of `Axes.set`."""
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    axes.set(**settings)
    yield axes
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)

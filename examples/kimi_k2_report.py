"""The figures and the picture of kimi_k2_mini.py."""

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import colors, ticker
from matplotlib.axes import Axes


matplotlib.use("Agg")
import matplotlib.pyplot as plt


COLORS = ("#1b7fbd", "#d95f02")


class History(NamedTuple):
    """A run, step by step."""

    loss: np.ndarray  # shape=(steps,)
    busiest: np.ndarray  # shape=(steps,); see `busiest`
    max_logits: np.ndarray  # shape=(steps, layers, heads)
    gamma: np.ndarray  # shape=(steps, layers, heads); 1 where the clip let be
    validation_loss: float


def summary(name: str, history: History, threshold: float) -> str:
    """The figures of a run; the last quarter is of its steps."""
    largest = history.max_logits.max(axis=(1, 2))
    last = largest[-max(1, len(largest) // 4) :]
    fired = (history.gamma < 1).any(axis=0)
    return f"""{name}
  validation loss          {history.validation_loss:.4f} nats per byte
  largest logit            {largest.max():.1f}
  ... of the last quarter  {last.max():.1f}
  ... its 95th percentile  {np.quantile(last, 0.95) / threshold:.2f} thresholds
  heads ever clipped       {fired.sum()} of {fired.size} ({fired.mean():.0%})
  busiest expert           {history.busiest[-len(last) :].mean():.2f} fair shares"""


def draw(
    results: dict[str, History], file: Path, *, threshold: float, step_bytes: int
) -> None:
    """Draws the largest logit of the model, and below it that of every head."""
    heights = [2.4] + [3.0] * len(results)
    figure, (top, *maps) = plt.subplots(
        len(heights),
        figsize=(9.2, sum(heights)),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
    )
    draw_largest(top, results, threshold)
    norm = logit_colors(results, threshold)
    for axes, (name, history) in zip(maps, results.items(), strict=True):
        draw_heads(axes, name, history, norm)
    maps[-1].set(xlabel=f"training step ({step_bytes:,} bytes each)")
    bar = figure.colorbar(
        maps[0].images[0],
        ax=maps,
        label="largest logit of a head in a step",
        extend="min",
        pad=0.01,
    )
    bar.ax.axhline(threshold, color="black", linestyle=":")
    label_logits(bar.ax.yaxis)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_largest(axes: Axes, results: dict[str, History], threshold: float) -> None:
    for (name, history), color in zip(results.items(), COLORS, strict=False):
        largest = history.max_logits.max(axis=(1, 2))
        axes.plot(np.arange(1, len(largest) + 1), largest, color, label=name)
    label = f"threshold {threshold:g}"
    axes.axhline(threshold, color="black", linestyle=":", label=label)
    axes.set(ylabel="largest logit, all heads", yscale="log")
    label_logits(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


def logit_colors(results: dict[str, History], threshold: float) -> colors.Normalize:
    """White at the threshold, and equal factors above and below it alike."""
    peak = max(history.max_logits.max() for history in results.values())
    reach = max(2.0, peak / threshold)
    return colors.LogNorm(threshold / reach, threshold * reach)


def draw_heads(axes: Axes, name: str, history: History, norm: colors.Normalize) -> None:
    """A row per head, colored by its logits and dotted where it was clipped."""
    steps, layers, heads = history.max_logits.shape
    axes.imshow(
        history.max_logits.reshape(steps, -1).T,
        norm=norm,
        cmap="RdBu_r",
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, steps + 0.5, layers * heads, 0),
    )
    step, row = np.nonzero(history.gamma.reshape(steps, -1) < 1)
    axes.plot(step + 1, row + 0.75, "k.", markersize=1.2)
    axes.hlines(heads * np.arange(1, layers), 0.5, steps + 0.5, "white", linewidth=3)
    ticks = np.arange(layers * heads) + 0.5
    axes.set_yticks(ticks, row_labels(layers, heads), fontsize=9.5)
    dots = " (a dot where the clip scaled a head down)" if len(step) else ""
    axes.set_title(name + dots, loc="left", fontsize=11)


def row_labels(layers: int, heads: int) -> list[str]:
    """The first head of a layer names it too."""
    return [
        f"head {head}" if head else f"layer {layer} · head 0"
        for layer in range(layers)
        for head in range(heads)
    ]


def label_logits(axis: Any) -> None:
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())

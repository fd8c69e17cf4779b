"""The frames of animation.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import animation, ticker
from matplotlib.axes import Axes


FRAMES_PER_SECOND = 10
STILL = 0.16  # the share of the frames in which the end stays
GREEN, ORANGE, BLUE = "#1b9e77", "#d95f02", "#1b7fbd"
STYLE: dict[Any, Any] = {
    "font.size": 11.5,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Show = Callable[[float], None]  # draws a panel at a progress from 0 to 1


def draw(
    spectra: np.ndarray,
    unclipped: np.ndarray,
    clipped: np.ndarray,
    file: Path,
    *,
    threshold: float,
    frames: int,
) -> None:
    """Writes a GIF of `frames` frames.

    `spectra` has a row of singular values before and after each step of Newton-Schulz,
    `unclipped` and `clipped` a row of the heads' logits for each training step.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(8, 4), facecolor="white", layout="constrained"
        )
        panels = (
            draw_spectrum(left, spectra),
            draw_logits(right, unclipped, clipped, threshold),
        )
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not for every frame
        moving = max(1, round((1 - STILL) * frames) - 1)

        def show(frame: int) -> None:
            for panel in panels:
                panel(min(1.0, frame / moving))

        film = animation.FuncAnimation(figure, show, frames, init_func=lambda: None)
        writer = animation.PillowWriter(fps=FRAMES_PER_SECOND)
        film.save(file, writer=writer, dpi=100)
        plt.close(figure)


def draw_spectrum(axes: Axes, spectra: np.ndarray) -> Show:
    steps = len(spectra) - 1
    first = spectra[0]
    ranks = np.arange(1, len(first) + 1)
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    axes.plot(ranks, first, color="#aaaaaa", linewidth=1.2)
    half = len(first) // 2
    axes.annotate(
        "momentum",
        (ranks[half], first[half]),
        (-3, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        color="#777777",
    )
    (dots,) = axes.plot(ranks, first, ".", color=GREEN)
    axes.set(yscale="log", ylim=(first.min() / 2, 3))
    axes.set(xlabel="singular value, largest first")
    axes.yaxis.set_major_formatter("{x:g}")
    title = axes.set_title("Muon")

    def show(progress: float) -> None:
        step, part = divmod(progress * steps, 1)
        before, after = spectra[int(step)], spectra[min(int(step) + 1, steps)]
        moved = part**2 * (3 - 2 * part)  # starts and ends at rest
        dots.set_ydata(before ** (1 - moved) * after**moved)
        done = round(progress * steps)
        title.set_text(f"Muon: Newton-Schulz step {done} of {steps}")

    return show


def draw_logits(
    axes: Axes, unclipped: np.ndarray, clipped: np.ndarray, threshold: float
) -> Show:
    steps, heads = unclipped.shape
    style: dict[str, Any] = dict(linewidth=1, alpha=0.8)
    empty = np.empty((0, heads))
    without = axes.plot([], empty, color=ORANGE, **style)
    held = axes.plot([], empty, color=BLUE, **style)
    axes.axhline(threshold, color="black", linestyle=":", linewidth=1)
    axes.set(xlim=(0, steps), ylim=(0, 1.05 * unclipped.max()), xlabel="training step")
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
    axes.set_title("QK-Clip: largest logit of each head")
    axes.legend(
        [without[0], held[0], axes.lines[-1]],
        ["without QK-Clip", "with QK-Clip", f"threshold {threshold:g}"],
        frameon=False,
        loc="upper left",
    )

    def show(progress: float) -> None:
        seen = 1 + round(progress * (steps - 1))
        for lines, history in ((without, unclipped), (held, clipped)):
            for line, head in zip(lines, history.T, strict=True):
                line.set_data(np.arange(1, seen + 1), head[:seen])

    return show

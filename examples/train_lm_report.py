"""The table and the picture at the end of a comparison."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import ticker


History = list[dict[str, Any]]

COLORS = {"adamw": "#777777", "muon": "#d95f02", "muonclip": "#1b7fbd"}
NAMES = {"adamw": "AdamW", "muon": "Muon", "muonclip": "MuonClip"}


def table(results: dict[str, History]) -> str:
    """One row per optimizer: where it ended, and how soon it was as good as AdamW."""
    columns = ("validation loss", "steps to AdamW", "largest logit", "tokens/s")
    head = " " * 10 + "".join(f"{column:>17}" for column in columns)
    return "\n".join([head] + [_row(name, results) for name in results])


def steps_to(history: History, loss: float) -> float | None:
    """The step at which the validation loss first reached `loss`, interpolated."""
    before = None
    for record in history:
        if record["validation_loss"] <= loss:
            if before is None:
                return record["step"]
            share = (before["validation_loss"] - loss) / (
                before["validation_loss"] - record["validation_loss"]
            )
            return before["step"] + share * (record["step"] - before["step"])
        before = record
    return None


def draw(results: dict[str, History], file: Path, *, threshold: float) -> None:
    """Draws validation loss and largest logit against step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, history in results.items():
        steps = [record["step"] for record in history]
        style = dict(color=COLORS[name], label=NAMES[name])
        left.plot(steps, [r["validation_loss"] for r in history], **style)
        right.plot(steps, [r["max_logit"] for r in history], **style)
    if "muonclip" in results:
        right.axhline(threshold, color="black", linewidth=0.8, linestyle=":")
        place = right.get_yaxis_transform()  # share of the width, logit
        label = f"threshold {threshold:g}"
        right.text(1, 0.97 * threshold, label, transform=place, ha="right", va="top")
    left.set(xlabel="step", ylabel="validation loss (nats per byte)")
    right.set(xlabel="step", ylabel="largest attention logit", yscale="log")
    right.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter(ticker.NullFormatter())
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _row(name: str, results: dict[str, History]) -> str:
    history = results[name]
    goal = results["adamw"][-1]["validation_loss"] if "adamw" in results else None
    reached = None if goal is None else steps_to(history, goal)
    largest = max(record["max_logit"] for record in history)
    # The first interval holds the compilation, hence the median.
    speed = np.median([record["tokens_per_second"] for record in history])
    cells = (
        f"{history[-1]['validation_loss']:.4f}",
        "-" if reached is None else f"{reached:.0f}",
        f"{largest:.1f}",
        f"{speed:,.0f}",
    )
    return f"{NAMES[name]:10}" + "".join(f"{cell:>17}" for cell in cells)

"""The table, the sentence and the picture at the end of a comparison."""

import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import jax
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


def summary(results: dict[str, History], *, threshold: float) -> str:
    """What was won, in one sentence for each of Muon and the clip."""
    sentences, ends = [], {name: history[-1] for name, history in results.items()}
    if {"muon", "adamw"} <= results.keys():
        goal = ends["adamw"]["validation_loss"]
        gain = goal - ends["muon"]["validation_loss"]
        reached, steps = steps_to(results["muon"], goal), ends["adamw"]["step"]
        sentences.append(
            f"Muon did not reach AdamW's final loss in {steps} steps."
            if reached is None
            else f"Muon reached AdamW's final loss after {reached:.0f} of {steps} "
            f"steps ({reached / steps:.0%}) and ended {gain:.2f} nats lower."
        )
    if {"muon", "muonclip"} <= results.keys():
        count = sum(record["clipped"] for record in results["muonclip"])
        with_clip, without = (ends[x]["max_logit"] for x in ("muonclip", "muon"))
        sentences.append(
            f"QK-Clip at {threshold:g} scaled heads {count:,} times: at the end the "
            f"largest attention logit was {with_clip:.1f}, without the clip "
            f"{without:.1f}."
            if count
            else f"No attention logit exceeded {threshold:g}: QK-Clip changed nothing."
        )
    return "\n".join(sentences)


def draw(
    results: dict[str, History],
    file: Path,
    *,
    threshold: float,
    rates: dict[str, float],
    columns: int = 2,
) -> None:
    """Draws validation loss and largest logit against step, side by side or stacked."""
    rows = 2 // columns
    figure, (left, right) = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 4 * rows), layout="constrained"
    )
    for name, history in results.items():
        steps = [record["step"] for record in history]
        label = f"{NAMES[name]}, learning rate {rates[name]:g}"
        # Muon's curve stays visible under MuonClip's.
        style = dict(color=COLORS[name], label=label, lw=3 if name == "muon" else 1.5)
        left.plot(steps, [r["validation_loss"] for r in history], **style)
        right.plot(steps, [r["max_logit"] for r in history], **style)
    titles = ["Validation loss", "Largest attention logit"]
    if {"muon", "adamw"} <= results.keys():
        goal, last = (results["adamw"][-1][key] for key in ("validation_loss", "step"))
        reached = steps_to(results["muon"], goal)
        if reached is not None:
            titles[0] = f"Muon needs {100 * reached / last:.0f} % of AdamW's steps"
            left.hlines(goal, reached, last, color="black", lw=0.8, ls=":")
            left.annotate(
                f"AdamW's final loss,\nreached at step {reached:.0f}",
                (reached, goal),
                # The corner that falling curves leave empty.
                xytext=(0.03, 0.05),
                textcoords="axes fraction",
                arrowprops={"arrowstyle": "->"},
            )
    if "muonclip" in results:
        largest = results["muonclip"][-1]["max_logit"]
        titles[1] = f"MuonClip ends with a largest logit of {largest:.1f}"
        if not any(record["clipped"] for record in results["muonclip"]):
            titles[1] = f"No logit exceeded {threshold:g}: nothing was clipped"
        elif largest < 1.2 * threshold:
            titles[1] = f"MuonClip holds the logits near {threshold:g}"
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
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def groups(labels: Any) -> str:
    """The parameters of Muon and of AdamW; a star stands for the number of a block."""
    found: dict[str, dict[str, None]] = {"Muon": {}, "AdamW": {}}
    for path, label in jax.tree.leaves_with_path(labels):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        name = re.sub(r"/\d+/", "/*/", name.removesuffix("/value"))
        found["Muon" if label == "matrix" else "AdamW"][name] = None
    return "\n".join(
        in_terminal(f"{name} updates {', '.join(own)}") for name, own in found.items()
    )


def in_terminal(line: str) -> str:
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent="  ")


def _row(name: str, results: dict[str, History]) -> str:
    history = results[name]
    goal = results["adamw"][-1]["validation_loss"] if "adamw" in results else None
    reached = None if goal is None else steps_to(history, goal)
    # The first interval holds the compilation, hence the median.
    speed = np.median([record["tokens_per_second"] for record in history])
    cells = (
        f"{history[-1]['validation_loss']:.4f}",
        "-" if reached is None else f"{reached:.0f}",
        f"{_largest(history):.1f}",
        f"{speed:,.0f}",
    )
    return f"{NAMES[name]:10}" + "".join(f"{cell:>17}" for cell in cells)


def _largest(history: History) -> float:
    return max(record["max_logit"] for record in history)

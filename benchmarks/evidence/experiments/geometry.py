"""The spectra that Muon leaves in weights, and the size of its steps."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from pictures import panels
from tables import Table

from ..lab import Lab, Result
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import COLORS, NAMES
from ..tuning import Pair, tuned_pair


SEEDS = 3
SIDES = Pair._fields


def experiment(lab: Lab, plan: Plan) -> Section:
    results = lab.gather(
        {
            (corpus, side): runs(plan, run)
            for corpus in plan.corpora
            for side, run in tuned_pair(lab, plan, corpus)._asdict().items()
        }
    )
    higher = {corpus: share_higher(results, corpus) for corpus in plan.corpora}
    sizes = {side: rms_by_shape(results, plan.corpora, side) for side in SIDES}
    draw(plan, results)
    muon = [rms for values in sizes["muon"].values() for rms in values]
    return Section(
        title="Muon's geometry",
        claim="Moonlight (arXiv:2502.16982): the SVD entropy of more than 90 % of the "
        "weight matrices is higher with Muon than with AdamW, and with its scaling the "
        "RMS of an update is 0.2, as AdamW's is 0.2 to 0.4, for every shape.",
        setting="3 layers of width 64, 4 query heads with one key (so that matrices of "
        "four shapes occur), 400 steps with the rates and weight decays tuned for four "
        f"keys; {SEEDS} seeds; the RMS at ten steps of every run, without weight decay "
        "and over the learning rate.",
        tables=[entropy_table(results, plan, higher), rms_table(sizes)],
        parts={
            "higher entropy of more than 90 % of the matrices": [
                share > 0.9 for share in higher.values()
            ],
            "steps of a root mean square near 0.2": [
                min(muon) > 0.15,
                max(muon) < 0.25,
            ],
        },
        figure="geometry.png",
        remarks="It counts as reproduced if more than 90 % of the matrices, seed by "
        "seed, have the higher entropy with Muon on every corpus, and the RMS of "
        "Muon's steps is between 0.15 and 0.25 for every shape: Newton-Schulz "
        "leaves singular values between 0.7 and 1.2, not at 1.",
    )


def runs(plan: Plan, run: Run) -> list[Run]:
    run = run.but(key_heads=1, probe="geometry", evaluations=10)
    return list(plan.over_seeds(run, SEEDS))


def entropies(results: list[Result]) -> np.ndarray:
    """Returns the entropies at the end of every run, `(seeds, matrices)`."""
    last = [result["geometry"][-1] for result in results]
    return np.array([[matrix["entropy"] for matrix in of.values()] for of in last])


def share_higher(results, corpus: str) -> float:
    pair = [entropies(results[corpus, side]) for side in ("muon", "adamw")]
    return float(np.mean(pair[0] > pair[1]))


def rms_by_shape(results, corpora: Sequence[str], side: str) -> dict[str, list[float]]:
    """Returns the RMS of all steps that were seen, by the matrix's shape."""
    by_shape: dict[str, list[float]] = {}
    for corpus in corpora:
        for result in results[corpus, side]:
            for moment in result["geometry"]:
                for matrix in moment.values():
                    shape = " x ".join(map(str, matrix["shape"]))
                    by_shape.setdefault(shape, []).append(matrix["update_rms"])
    return by_shape


def entropy_table(results, plan: Plan, higher: dict[str, float]) -> Table:
    rows = []
    for corpus in plan.corpora:
        means = [f"{entropies(results[corpus, side]).mean():.3f}" for side in SIDES]
        rows.append([corpus, *means, f"{higher[corpus]:.0%}"])
    columns = [
        "corpus",
        "AdamW, mean entropy",
        "Muon, mean entropy",
        "higher with Muon",
    ]
    return Table(columns, rows, "SVD entropy of the hidden matrices at the end.")


def rms_table(sizes: dict[str, dict[str, list[float]]]) -> Table:
    rows = [
        [
            shape,
            *(
                f"{statistics.median(s):.3f} ({min(s):.3f} to {max(s):.3f})"
                for s in (of_side[shape] for of_side in sizes.values())
            ),
        ]
        for shape in sizes["muon"]
    ]
    return Table(
        ["matrix", "AdamW", "Muon"],
        rows,
        "RMS of a step over its rate: median, least and most.",
    )


def draw(plan: Plan, results) -> None:
    titles = [
        f"{c}: {what}"
        for c in plan.corpora
        for what in ("SVD entropy", "RMS of a step")
    ]
    with panels(plan.figures / "geometry.png", titles, rows=len(plan.corpora)) as axes:
        for i, corpus in enumerate(plan.corpora):
            pair = [entropies(results[corpus, side]).ravel() for side in SIDES]
            draw_entropies(axes[2 * i], *pair)
            sizes = {side: rms_by_shape(results, [corpus], side) for side in SIDES}
            draw_rms(axes[2 * i + 1], sizes)


def draw_entropies(axes: Axes, adamw: np.ndarray, muon: np.ndarray) -> None:
    """A point per matrix and seed; above the line Muon's is higher."""
    ends = [min(adamw.min(), muon.min()), max(adamw.max(), muon.max())]
    axes.plot(adamw, muon, ".", color=COLORS["muon"])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xlabel="with AdamW, a point per matrix", ylabel="with Muon")
    axes.locator_params(nbins=6)


def draw_rms(axes: Axes, sizes: dict[str, dict[str, list[float]]]) -> None:
    for side, by_shape in sizes.items():
        shift = 0.15 if side == "muon" else -0.15
        style: dict[str, Any] = dict(color=COLORS[side], alpha=0.5, label=NAMES[side])
        x = [i + shift for i, values in enumerate(by_shape.values()) for _ in values]
        axes.plot(x, [rms for of in by_shape.values() for rms in of], ".", **style)
        axes.set_xticks(range(len(by_shape)), list(by_shape), fontsize=9)
    axes.axhline(0.2, color="black", linewidth=0.8, linestyle=":")
    axes.set(ylabel="RMS over the learning rate", ylim=(0, None))

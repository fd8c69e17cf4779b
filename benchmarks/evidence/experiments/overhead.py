"""What MuonClip adds to a training step, by size of model and batch."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from alternating import alternate, ratios
from pictures import panels
from tables import Table

from ..lab import Lab
from ..optimizers import hyperparameters
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import CYCLE


STEPS, REPEATS = 5, 20  # of Newton-Schulz; timed steps
SIZES = (
    dict(layers=3, width=64, heads=4),
    dict(layers=4, width=128, heads=8),
    dict(layers=4, width=256, heads=16),
)
BATCHES = (8, 32, 128)
SIDES = {
    "AdamW": dict(optimizer="adamw", statistics=False),
    "Muon": dict(statistics=False),
    "Muon, statistics": {},
    "MuonClip": dict(threshold=30.0),
}
OURS = list(SIDES)[1:]


def experiment(lab: Lab, plan: Plan) -> Section:
    cells = [
        measured(lab, plan, shape, batch)
        for shape, batch in plan.some(list(itertools.product(SIZES, BATCHES)))
    ]
    draw(plan, cells)
    columns = [
        "width",
        "tokens a batch",
        "AdamW, ms",
        *(f"{side} over AdamW" for side in OURS),
        "T m / B",
    ]
    rows = [
        [str(c["width"]), f"{c['tokens']:,}", f"{c['adamw_ms']:.1f}"]
        + [show(added(c, name)) for name in OURS]
        + [f"{c['bound']:.1%}"]
        for c in cells
    ]
    return Section(
        title="Overhead",
        claim="Keller Jordan: Muon adds at most T m / B to the arithmetic of a "
        "training step, for T steps of Newton-Schulz, width m and B tokens a batch. "
        "QK-Clip's statistics are logits that attention forms anyway.",
        setting=f"Whole training steps on all cores, {REPEATS} of each side in turn, "
        "medians of the ratios of neighbors and their quartiles; context 64, "
        "feed-forward 4 m.",
        tables=[Table(columns, rows)],
        parts={
            "MuonClip's time within the bound": [
                added(c, "MuonClip")[1] <= c["bound"] for c in cells
            ]
        },
        figure="overhead.png",
        remarks="It counts as reproduced if the median of the time that MuonClip adds "
        "stays below the bound on the arithmetic in every cell. Times, so an idle "
        "machine is needed.",
    )


def measured(lab: Lab, plan: Plan, shape: dict[str, int], batch: int) -> dict[str, Any]:
    run = plan.run("code", batch=batch, **shape)
    return dict(lab.once(f"overhead {run.key}", lambda: measure(run, plan)))


def measure(run: Run, plan: Plan) -> dict[str, Any]:
    sides = {name: side(run.but(**changes)) for name, changes in SIDES.items()}
    times = alternate(sides, 3 if plan.quick else REPEATS)
    tokens = run.batch * run.context
    return {
        "width": run.width,
        "tokens": tokens,
        "adamw_ms": 1e3 * statistics.median(times["AdamW"]),
        "bound": STEPS * run.width / tokens,
        **{
            side: statistics.quantiles(ratios(times, side, "AdamW"), n=4)
            for side in OURS
        },
    }


def added(cell: dict[str, Any], side: str) -> list[float]:
    """Quartiles of the share that is added to AdamW's time."""
    return [quantile - 1 for quantile in cell[side]]


def show(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:+.1%} ({low:+.1%} to {high:+.1%})"


def side(run: Run) -> Callable[[], Any]:
    """One training step after the other."""
    from ..texts import text
    from ..training import program

    compiled = program(run.program)
    tokens = text(run.corpus).batch(run.batch, run.context, 0, 0)
    carry, at = compiled.init(jax.random.key(0)), hyperparameters(run)[-1]

    def step() -> Any:
        nonlocal carry
        carry, *rest = compiled.step(carry, tokens, at)
        return carry, rest

    return step


def draw(plan: Plan, cells: list[dict[str, Any]]) -> None:
    widths = list(dict.fromkeys(c["width"] for c in cells))
    titles = [f"width {width}" for width in widths]
    settings: dict[str, Any] = dict(
        xlabel="tokens a batch", ylabel="added to AdamW's step", xscale="log"
    )
    with panels(plan.figures / "overhead.png", titles, **settings) as axes:
        for one, width in zip(axes, widths, strict=True):
            of_width = [c for c in cells if c["width"] == width]
            x = np.array([c["tokens"] for c in of_width])
            for i, (side, color) in enumerate(zip(OURS, CYCLE, strict=False)):
                low, median, high = np.array([added(c, side) for c in of_width]).T
                error, shift = (median - low, high - median), 1.1 ** (i - 1)
                style: dict[str, Any] = dict(fmt="o-", color=color, label=side)
                one.errorbar(x * shift, median, error, linewidth=1, **style)
            bounds = [c["bound"] for c in of_width]
            one.plot(x, bounds, ":", color="black", label="T m / B")
            # Linear where the times are no larger than their noise.
            one.set_yscale("symlog", linthresh=0.1)
            one.set_xticks(x, [f"{n:,}" for n in x])
            one.set_xticks([], minor=True)
            one.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")

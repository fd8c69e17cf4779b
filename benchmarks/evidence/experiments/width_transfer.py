"""Whether a learning rate tuned on a narrow model suits a wide one."""

from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..intervals import interval, paired
from ..lab import Lab, losses
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import band, CYCLE


WIDTHS, STEPS, SEEDS = (32, 64, 128), 200, 3
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 1.28e-1)
SCALINGS = {  # name: Muon's arguments, and what its rates are in terms of RATES
    "0.2 sqrt(max(m, n))": ((), 1.0),
    "sqrt(max(1, out / in))": ((("consistent_rms", None),), 2.0),
}
SHIFT, REGRET = 1.0, 0.02  # in factors of 2, in nats

Grid = dict[int, np.ndarray]


def experiment(lab: Lab, plan: Plan) -> Section:
    keys = [(corpus, scaling) for corpus in plan.corpora for scaling in SCALINGS]
    cells = [(*key, width) for key in keys for width in WIDTHS]
    lab.results(r for c in cells for of in grid_runs(plan, *c) for r in of)
    tune, report = (
        {
            key: {w: grid_losses(lab, plan, *key, w, part) for w in WIDTHS}
            for key in keys
        }
        for part in ("tune", "report")
    )
    outcomes = {key: Outcome(*key, tune[key], report[key]) for key in keys}
    draw(plan, report)
    columns = ["corpus", "scaling", *(f"best at width {w}" for w in WIDTHS)]
    columns += ["loss lost by keeping the narrow one's rate"]
    return Section(
        title="Learning-rate transfer across width",
        claim="Keller Jordan's scaling, sqrt(max(1, out / in)), is meant to leave the "
        "best learning rate where it is as widths grow, and Essential AI "
        "(arXiv:2505.02222) finds that rates transfer. Moonlight's (arXiv:2502.16982), "
        "0.2 sqrt(max(m, n)), is meant to give a step the RMS of AdamW's, so that "
        "AdamW's rates work, and says nothing of widths; both are put to the test.",
        setting=f"2 layers, heads of 16, {STEPS} steps, cosine schedule, weight decay "
        f"0.1, rates in factors of 2, {SEEDS} seeds. The best rate is that of a "
        "parabola through the best of the grid and its neighbors, in the logarithm "
        "of the rate, on the part of the text to tune on; the loss lost is that of "
        "the part to report on.",
        tables=[Table(columns, [outcome.row() for outcome in outcomes.values()])],
        parts={
            f"with {scaling}": [
                o.holds() for (_, of), o in outcomes.items() if of == scaling
            ]
            for scaling in SCALINGS
        },
        figure="width_transfer.png",
        remarks="It counts as reproduced for a scaling if the best rate moves by less "
        f"than a factor of 2 from width {WIDTHS[0]} to {WIDTHS[-1]} and keeping the "
        f"narrow model's rate loses less than {REGRET:g} nats on average. "
        + kept(outcomes),
    )


class Outcome:
    """The best rates by width, and what it costs to keep the first.

    `tune` and `report` are losses on these parts by width, `(seeds, rates)`.
    """

    def __init__(self, corpus: str, scaling: str, tune: Grid, report: Grid):
        self.name = [corpus, scaling]
        factor = SCALINGS[scaling][1]
        octaves = {w: [best_octave(seed) for seed in by] for w, by in tune.items()}
        self.best = {w: interval(values) for w, values in octaves.items()}
        self.rates = {w: factor * RATES[0] * 2**b.mean for w, b in self.best.items()}
        narrow, wide = WIDTHS[0], WIDTHS[-1]
        kept, best = (int(tune[w].mean(axis=0).argmin()) for w in (narrow, wide))
        self.regret = paired(report[wide][:, kept], report[wide][:, best])

    def holds(self) -> bool:
        first, last = self.best[WIDTHS[0]], self.best[WIDTHS[-1]]
        return abs(last.mean - first.mean) < SHIFT and self.regret.mean < REGRET

    def row(self) -> list[str]:
        best = [
            f"{self.rates[w]:.4f} (± {b.half:.2f} octaves)"
            if np.isfinite(b.mean)
            else "at the grid's edge"
            for w, b in self.best.items()
        ]
        return [*self.name, *best, self.regret.show(".4f")]


def kept(outcomes: dict[tuple[str, str], Outcome]) -> str:
    """Which scalings keep the rate on every corpus."""
    fails = {
        scaling for (_, scaling), outcome in outcomes.items() if not outcome.holds()
    }
    names = [scaling for scaling in SCALINGS if scaling not in fails]
    return f"It does with {' and '.join(names) or 'neither'}."


def grid_losses(
    lab: Lab, plan: Plan, corpus: str, scaling: str, width: int, part: str
) -> np.ndarray:
    """`(seeds, rates)`."""
    grid = grid_runs(plan, corpus, scaling, width)
    return np.array([losses(lab.results(of_rate), part) for of_rate in grid]).T


def grid_runs(plan: Plan, corpus: str, scaling: str, width: int) -> list[list[Run]]:
    """Returns a list for each rate, with a run for each seed."""
    muon, factor = SCALINGS[scaling]
    runs = [
        plan.run(
            corpus,
            layers=2,
            width=width,
            heads=width // 16,
            steps=STEPS,
            learning_rate=factor * rate,
            adam_learning_rate=8e-3,
            muon=muon,
        )
        for rate in RATES
    ]
    return [plan.over_seeds(run, SEEDS) for run in runs]


def best_octave(loss: np.ndarray) -> float:
    """Where a parabola through the best and its neighbors is least; NaN at an end."""
    best = int(np.argmin(loss))
    if best in (0, len(loss) - 1):
        return float("nan")
    left, middle, right = loss[best - 1 : best + 2]
    return best + float(0.5 * (left - right) / (left - 2 * middle + right))


def draw(plan: Plan, grids) -> None:
    titles = [f"{corpus}: {scaling}" for corpus, scaling in grids]
    settings: dict[str, Any] = dict(
        xlabel="learning rate", ylabel="loss, nats per byte", xscale="log"
    )
    file = plan.figures / "width_transfer.png"
    with panels(file, titles, rows=len(plan.corpora), **settings) as axes:
        for one, ((_, scaling), grid) in zip(axes, grids.items(), strict=True):
            x = [SCALINGS[scaling][1] * rate for rate in RATES]
            for width, color in zip(WIDTHS, CYCLE, strict=False):
                band(one, x, grid[width], color=color, label=f"width {width}")
                mean = grid[width].mean(axis=0)
                one.plot(x[mean.argmin()], mean.min(), "o", color=color)
            one.set_xticks(x, [f"{rate:g}" for rate in x])
            one.set_xticks([], minor=True)

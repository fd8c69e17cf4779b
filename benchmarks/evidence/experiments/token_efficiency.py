"""How many of AdamW's tokens Muon needs for the same loss."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from pictures import panels

from ..intervals import interval
from ..lab import Lab, losses
from ..plan import Plan
from ..run import Run
from ..section import Section, Table, verdict
from ..style import band, COLORS, NAMES
from ..tuning import Pair, tuned_pair


SIZES: tuple[dict[str, Any], ...] = (
    dict(layers=2, width=32, heads=2),
    dict(layers=3, width=64, heads=4),
    dict(layers=4, width=96, heads=6),
)
SCHEDULES = ("cosine", "constant")
SHARES = (0.35, 0.5, 0.7, 1.0)  # of AdamW's steps, each with a schedule of its own
SEEDS = 3
EVALUATIONS = 10  # of a run with a constant rate, whose every step is an end
BARS = {"Moonlight": 0.6, "Keller Jordan, Wen et al.": 0.75}  # with a little room

Path = list[tuple[float, float]]  # share of AdamW's tokens, loss
Outcomes = dict[tuple[str, str, int], "Outcome"]  # by corpus, schedule and size


class Outcome(NamedTuple):
    """What tuned AdamW and Muon came to, seed by seed."""

    pair: Pair
    adamw: list[float]
    muon: list[Path]

    @property
    def shares(self) -> list[float]:
        """Of AdamW's tokens that Muon needs for its loss; NaN if it fails."""
        return [
            reached(path, goal)
            for path, goal in zip(self.muon, self.adamw, strict=True)
        ]

    @property
    def ends(self) -> dict[str, list[float]]:
        """Losses after all steps."""
        return {"adamw": self.adamw, "muon": [path[-1][1] for path in self.muon]}


def experiment(lab: Lab, plan: Plan) -> Section:
    outcomes = measure_all(lab, plan)
    fits = {corpus: fitted(outcomes, corpus) for corpus in plan.corpora}
    largest = {corpus: of_largest(outcomes, corpus) for corpus in plan.corpora}
    shares = {c: interval(outcome.shares).mean for c, outcome in largest.items()}
    draw(plan, outcomes, largest, fits)
    return Section(
        title="Token efficiency",
        claim="Moonlight (arXiv:2502.16982): AdamW's loss at 52 % of its compute. "
        "Keller Jordan: 1.35 times fewer tokens (74 %). Wen et al. "
        "(arXiv:2509.02046), against a tuned AdamW of 0.1 B parameters: 1.4 times "
        "(71 %).",
        setting="400 steps of 1,024 bytes. Both optimizers tuned on a grid of "
        "learning rate (factors of 2) and weight decay (factors of 3) until the best "
        "value has neighbours on both sides, by another part of the text and another "
        f"seed than those reported; {SEEDS} seeds. Muon's AdamW side keeps AdamW's "
        "best rate. Under the cosine schedule Muon is also trained for "
        f"{', '.join(f'{s:.0%}' for s in SHARES[:-1])} of the steps, each with a "
        "whole schedule and the rates tuned for all of them; tokens are interpolated "
        "in their logarithm. Under the constant rate they are read off the curve.",
        tables=[table(outcomes), fit_table(fits)],
        verdict=verdict(
            share <= bar for share in shares.values() for bar in BARS.values()
        ),
        figure="token_efficiency.png",
        remarks="At the largest size under the cosine schedule Muon needs "
        f"{said(shares)} of AdamW's tokens. A claim counts as reproduced, on every "
        f"corpus, up to {said(BARS)}. All sizes saw the same tokens, so that the "
        "fitted laws are not those of compute-optimal training.",
    )


def said(shares: dict[str, float]) -> str:
    return " and ".join(f"{share:.0%} ({of})" for of, share in shares.items())


def measure_all(lab: Lab, plan: Plan) -> Outcomes:
    pairs = {
        (corpus, schedule, size): tuned_pair(
            lab, plan, corpus, schedule=schedule, **shape
        )
        for size, shape in enumerate(plan.some(SIZES))
        for corpus in plan.corpora
        for schedule in SCHEDULES
    }
    lab.results(
        run
        for pair in pairs.values()
        for end in (pair.adamw, *lengths(pair.muon))
        for run in reported(plan, end)
    )
    return {
        key: measure(lab, plan, pair, lengths(pair.muon)) for key, pair in pairs.items()
    }


def measure(
    lab: Lab, plan: Plan, pair: Pair, muon: Sequence[Run], seeds: int = SEEDS
) -> Outcome:
    """`muon` are its runs of every length."""
    ends = [reported(plan, end, seeds) for end in (pair.adamw, *muon)]
    adamw, *by_length = lab.gather(dict(enumerate(ends))).values()
    paths = [
        [
            (step / pair.muon.steps, loss)
            for r in of_seed
            for step, _, loss in r["curve"]
        ]
        for of_seed in zip(*by_length, strict=True)
    ]
    return Outcome(pair, losses(adamw), paths)


def lengths(run: Run) -> list[Run]:
    """Under a constant rate one run has them all."""
    shares = (1.0,) if run.schedule == "constant" else SHARES
    return [run.but(steps=round(share * run.steps)) for share in shares]


def reported(plan: Plan, run: Run, seeds: int = SEEDS) -> list[Run]:
    evaluations = EVALUATIONS if run.schedule == "constant" else 1
    return list(plan.over_seeds(run.but(evaluations=evaluations), seeds))


def reached(path: Path, goal: float) -> float:
    """Where a path first comes to the goal, between its points."""
    before = path[0]
    if before[1] <= goal:
        return before[0]
    for point in path[1:]:
        if point[1] <= goal:
            part = (before[1] - goal) / (before[1] - point[1])
            return float(before[0] * (point[0] / before[0]) ** part)
        before = point
    return float("nan")


def of_cosine(outcomes: Outcomes, corpus: str) -> Iterable[Outcome]:
    """By size."""
    return (o for key, o in outcomes.items() if key[:2] == (corpus, "cosine"))


def of_largest(outcomes: Outcomes, corpus: str) -> Outcome:
    return list(of_cosine(outcomes, corpus))[-1]


def fitted(outcomes: Outcomes, corpus: str) -> dict[str, tuple[float, float]]:
    """By optimizer, a and b of loss = a C^-b over the sizes, and so on the figure."""
    laws = {}
    for side in Pair._fields:
        logs = np.log(compute_and_loss(outcomes, corpus, side))
        slope, level = np.polyfit(logs[:, 0], logs[:, 1], 1)
        laws[side] = (float(np.exp(level)), float(-slope))
    return laws


def compute_and_loss(outcomes: Outcomes, corpus: str, side: str) -> np.ndarray:
    """FLOP and mean loss by size, `(sizes, 2)`."""
    return np.array(
        [
            (6.0 * parameters(o.pair.muon) * o.pair.muon.tokens, np.mean(o.ends[side]))
            for o in of_cosine(outcomes, corpus)
        ]
    )


def parameters(run: Run) -> int:
    """Those of the hidden matrices."""
    return 12 * run.layers * run.width**2


def table(outcomes: Outcomes) -> Table:
    columns = ["corpus", "schedule", "matrix parameters", "AdamW: rate, decay"]
    columns += ["Muon: rate, decay", "AdamW's loss", "Muon's loss", "AdamW's tokens"]
    rows = []
    for (corpus, schedule, _), outcome in outcomes.items():
        share = interval(outcome.shares)
        rows.append(
            [
                corpus,
                schedule,
                f"{parameters(outcome.pair.muon):,}",
                *(f"{r.learning_rate:.2g}, {r.weight_decay:g}" for r in outcome.pair),
                *(interval(losses).show() for losses in outcome.ends.values()),
                f"{share.mean:.0%} ± {share.half:.0%}",
            ]
        )
    return Table(columns, rows, "Losses in nats per byte, ± the 95 % interval.")


def fit_table(fits: dict[str, dict[str, tuple[float, float]]]) -> Table:
    rows = [
        [corpus, *(f"{a:.3g} C^-{b:.4f}" for a, b in laws.values())]
        for corpus, laws in fits.items()
    ]
    caption = "Fitted loss against compute C = 6 N D in FLOP, cosine schedule."
    return Table(["corpus", "AdamW", "Muon"], rows, caption)


def draw(plan: Plan, outcomes: Outcomes, largest, fits) -> None:
    file = plan.figures / "token_efficiency.png"
    titles = [f"{c}: {what}" for c in plan.corpora for what in ("tokens", "compute")]
    with panels(file, titles, rows=len(plan.corpora)) as axes:
        for i, corpus in enumerate(plan.corpora):
            draw_tokens(axes[2 * i], largest[corpus])
            for side, law in fits[corpus].items():
                points = compute_and_loss(outcomes, corpus, side)
                draw_law(axes[2 * i + 1], side, points, *law)


def draw_tokens(axes: Axes, outcome: Outcome) -> None:
    """Muon's loss by its tokens, beside AdamW's at the end."""
    goal = interval(outcome.adamw)
    axes.axhspan(goal.low, goal.high, color=COLORS["adamw"], alpha=0.3, linewidth=0)
    axes.axhline(goal.mean, color=COLORS["adamw"], label=NAMES["adamw"])
    paths = np.array(outcome.muon)  # (seeds, shares, 2)
    tokens = paths[0, :, 0] * outcome.pair.muon.tokens
    band(axes, tokens, paths[..., 1], color=COLORS["muon"], label=NAMES["muon"])
    axes.set(xlabel="tokens of Muon", ylabel="loss, nats per byte")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=6)


def draw_law(axes: Axes, side: str, points: np.ndarray, a: float, b: float) -> None:
    axes.loglog(*points.T, "o", color=COLORS[side])
    fit = a * points[:, 0] ** -b
    axes.loglog(points[:, 0], fit, color=COLORS[side], label=NAMES[side])
    axes.set(xlabel="compute 6 N D, FLOP", ylabel="loss, nats per byte")
    axes.yaxis.set_minor_formatter("{x:.2f}")

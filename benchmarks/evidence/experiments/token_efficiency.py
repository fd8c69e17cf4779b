"""How many of AdamW's tokens Muon needs for the same loss."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from pictures import panels
from tables import Table

from ..intervals import Interval, interval
from ..lab import Lab
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import band, COLORS, NAMES
from ..tokens import CAPTION, COLUMNS, lengths, measure, Outcome, reported, SHARES
from ..tuning import Pair, tuned_pair


SIZES: tuple[dict[str, Any], ...] = (
    dict(layers=2, width=32, heads=2),
    dict(layers=3, width=64, heads=4),
    dict(layers=4, width=96, heads=6),
)
SCHEDULES = ("cosine", "constant")
SEEDS = 3
CLAIMED = {"Moonlight": 0.52, "Keller Jordan": 0.74, "Wen et al.": 0.71}

Outcomes = dict[tuple[str, str, int], Outcome]  # by corpus, schedule and size
Law = tuple[float, Interval]  # a and b of loss = a C^-b


def experiment(lab: Lab, plan: Plan) -> Section:
    outcomes = measure_all(lab, plan)
    fits = {corpus: fitted(outcomes, corpus) for corpus in plan.corpora}
    largest = {corpus: of_largest(outcomes, corpus) for corpus in plan.corpora}
    shares = [outcome.share for outcome in largest.values()]
    draw(plan, outcomes, largest, fits)
    return Section(
        title="Token efficiency",
        claim="Moonlight (arXiv:2502.16982): AdamW's loss at 52 % of its compute. "
        "Keller Jordan: 1.35 times fewer tokens (74 %). Wen et al. "
        "(arXiv:2509.02046), against a tuned AdamW of 0.1 B parameters: 1.4 times "
        "(71 %).",
        setting="400 steps of 1,024 bytes. Both optimizers tuned on a grid of "
        "learning rate (factors of 2) and weight decay (factors of 3), by a walk to "
        "the best value among its neighbors on both axes, with one seed, another "
        f"than the {SEEDS} that are reported, and another part of the text. AdamW's "
        "parameters keep AdamW's best rate. Under the cosine schedule Muon is also "
        f"trained for {', '.join(f'{s:.0%}' for s in SHARES[:-1])} of the steps, each "
        "with a whole schedule and the rates tuned for the full length; tokens are "
        "interpolated in their logarithm. Under the constant rate they are read off "
        "the curve.",
        tables=[table(outcomes), fit_table(fits)],
        parts={
            f"{of}'s {claimed:.0%}": [reaches(share, claimed) for share in shares]
            for of, claimed in CLAIMED.items()
        },
        figure="token_efficiency.png",
        remarks="A claim counts as reproduced unless the interval of the largest "
        "size under the cosine schedule is above its figure on some corpus: "
        f"{said(shares)}. All sizes saw the same tokens, so that the fitted laws are "
        "not those of compute-optimal training. What the share depends on, the next "
        "section asks.",
    )


def reaches(share: Interval, claimed: float) -> bool:
    return share.low <= claimed


def said(shares: list[Interval]) -> str:
    """Claim by claim."""
    return "; ".join(
        f"{of}, {claimed:.0%}: "
        + ("yes" if all(reaches(share, claimed) for share in shares) else "no")
        for of, claimed in CLAIMED.items()
    )


def measure_all(lab: Lab, plan: Plan) -> Outcomes:
    pairs = {
        (corpus, schedule, size): tuned_pair(
            lab, plan, corpus, schedule=schedule, **shape
        )
        for size, shape in enumerate(plan.some(SIZES))
        for corpus in plan.corpora
        for schedule in SCHEDULES
    }
    lab.results(  # all of them together
        run
        for pair in pairs.values()
        for end in (pair.adamw, *lengths(pair.muon))
        for run in reported(plan, end, SEEDS)
    )
    return {
        key: measure(lab, plan, pair, lengths(pair.muon), SEEDS)
        for key, pair in pairs.items()
    }


def of_cosine(outcomes: Outcomes, corpus: str) -> Iterable[Outcome]:
    """The outcomes under the cosine schedule, by size."""
    return (o for key, o in outcomes.items() if key[:2] == (corpus, "cosine"))


def of_largest(outcomes: Outcomes, corpus: str) -> Outcome:
    return list(of_cosine(outcomes, corpus))[-1]


def fitted(outcomes: Outcomes, corpus: str) -> dict[str, Law]:
    """Fits a law for each optimizer over the sizes, seed by seed."""
    laws = {}
    for side in Pair._fields:
        logs = np.log(compute_and_losses(outcomes, corpus, side))
        slopes, levels = np.polyfit(logs[:, 0], logs[:, 1:], 1)
        laws[side] = (float(np.exp(levels.mean())), interval(-slopes))
    return laws


def compute_and_losses(outcomes: Outcomes, corpus: str, side: str) -> np.ndarray:
    """FLOP and the losses of all seeds by size, `(sizes, 1 + seeds)`."""
    return np.array(
        [
            [6.0 * parameters(o.pair.muon) * o.pair.muon.tokens, *o.ends[side]]
            for o in of_cosine(outcomes, corpus)
        ]
    )


def parameters(run: Run) -> int:
    """Counts the entries of the hidden matrices."""
    return 12 * run.layers * run.width**2


def table(outcomes: Outcomes) -> Table:
    columns = ["corpus", "schedule", "matrix parameters", "AdamW: rate, decay"]
    rows = [
        [
            corpus,
            schedule,
            f"{parameters(outcome.pair.muon):,}",
            *(f"{r.learning_rate:.2g}, {r.weight_decay:g}" for r in outcome.pair),
            *outcome.row(),
        ]
        for (corpus, schedule, _), outcome in outcomes.items()
    ]
    return Table([*columns, "Muon: rate, decay", *COLUMNS], rows, CAPTION)


def fit_table(fits: dict[str, dict[str, Law]]) -> Table:
    rows = [
        [corpus, *(f"{a:.3g} C^-b, b = {b.show('.4f')}" for a, b in laws.values())]
        for corpus, laws in fits.items()
    ]
    caption = "Fitted loss against compute C = 6 N D in FLOP, cosine schedule; N counts"
    caption += " the hidden matrices alone."
    return Table(["corpus", "AdamW", "Muon"], rows, caption)


def draw(plan: Plan, outcomes: Outcomes, largest, fits) -> None:
    file = plan.figures / "token_efficiency.png"
    titles = [f"{c}: {what}" for c in plan.corpora for what in ("tokens", "compute")]
    with panels(file, titles, rows=len(plan.corpora)) as axes:
        for i, corpus in enumerate(plan.corpora):
            draw_tokens(axes[2 * i], largest[corpus])
            for side, law in fits[corpus].items():
                points = compute_and_losses(outcomes, corpus, side)
                draw_law(axes[2 * i + 1], side, points, law)


def draw_tokens(axes: Axes, outcome: Outcome) -> None:
    """Muon's loss by its tokens, alongside AdamW's at the end."""
    goal = interval(outcome.adamw)
    axes.axhspan(goal.low, goal.high, color=COLORS["adamw"], alpha=0.3, linewidth=0)
    axes.axhline(goal.mean, color=COLORS["adamw"], label=NAMES["adamw"])
    paths = np.array(outcome.muon)  # (seeds, shares, 2)
    tokens = paths[0, :, 0] * outcome.pair.muon.tokens
    band(axes, tokens, paths[..., 1], color=COLORS["muon"], label=NAMES["muon"])
    axes.set(xlabel="tokens of Muon", ylabel="loss, nats per byte")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=6)


def draw_law(axes: Axes, side: str, points: np.ndarray, law: Law) -> None:
    """The line of the fit, and every size's mean with its interval."""
    compute, (a, b) = points[:, 0], law
    means = [interval(losses) for losses in points[:, 1:]]
    losses, halves = [m.mean for m in means], [m.half for m in means]
    axes.errorbar(compute, losses, halves, fmt="o", color=COLORS[side])
    fit = a * compute**-b.mean
    axes.loglog(compute, fit, color=COLORS[side], label=NAMES[side])
    axes.set(xlabel="compute 6 N D, FLOP", ylabel="loss, nats per byte")
    axes.yaxis.set_minor_formatter("{x:.2f}")

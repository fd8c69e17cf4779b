"""How many of AdamW's tokens Muon needs for the same loss."""

from collections.abc import Mapping
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
from ..tuning import tuned_pair


SIZES: tuple[dict[str, Any], ...] = (
    dict(layers=2, width=32, heads=2),
    dict(layers=3, width=64, heads=4),
    dict(layers=4, width=96, heads=6),
)
SCHEDULES = ("cosine", "constant")
SEEDS = 3
CLAIMED = {"Moonlight": 0.52, "Keller Jordan": 0.74, "Wen et al.": 0.71}

Outcomes = dict[tuple[str, str, int], Outcome]  # by corpus, schedule and size


def experiment(lab: Lab, plan: Plan) -> Section:
    outcomes = measure_all(lab, plan)
    largest = {corpus: of_largest(outcomes, corpus) for corpus in plan.corpora}
    shares = [outcome.share for outcome in largest.values()]
    draw(plan, largest)
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
        tables=[table(outcomes)],
        parts={
            f"{of}'s {claimed:.0%}": [reaches(share, claimed) for share in shares]
            for of, claimed in CLAIMED.items()
        },
        figure="token_efficiency.png",
        remarks="A claim counts as reproduced unless the interval of the largest "
        "size under the cosine schedule is above its figure on some corpus: "
        f"{said(shares)}. What the share depends on, the next section asks.",
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


def of_largest(outcomes: Outcomes, corpus: str) -> Outcome:
    """Under the cosine schedule."""
    return [o for key, o in outcomes.items() if key[:2] == (corpus, "cosine")][-1]


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


def draw(plan: Plan, largest: Mapping[str, Outcome]) -> None:
    file = plan.figures / "token_efficiency.png"
    with panels(file, plan.corpora) as axes:
        for one, outcome in zip(axes, largest.values(), strict=True):
            draw_tokens(one, outcome)


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

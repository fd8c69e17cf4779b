"""How many of AdamW's tokens Muon needs for the same loss."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .intervals import Interval, interval
from .lab import Lab, losses
from .plan import Plan
from .run import Run
from .tuning import Pair


SHARES = (0.35, 0.5, 0.7, 1.0)  # of AdamW's steps, each with a schedule of its own
EVALUATIONS = 10  # of a run with a constant rate, whose every step is an end

Path = list[tuple[float, float]]  # share of AdamW's tokens, loss


class Outcome(NamedTuple):
    """What tuned AdamW and Muon came to, seed by seed."""

    pair: Pair
    adamw: list[float]
    muon: list[Path]

    @property
    def shares(self) -> list[float]:
        """The share of AdamW's tokens that Muon needs; NaN if it never gets there."""
        return [
            reached(path, goal)
            for path, goal in zip(self.muon, self.adamw, strict=True)
        ]

    @property
    def share(self) -> Interval:
        return interval(self.shares)

    @property
    def ends(self) -> dict[str, list[float]]:
        """Losses after all steps."""
        return {"adamw": self.adamw, "muon": [path[-1][1] for path in self.muon]}

    def row(self) -> list[str]:
        """Both losses and the share, for a table."""
        shown = [interval(losses).show() for losses in self.ends.values()]
        return [*shown, self.show_share()]

    def show_share(self) -> str:
        """The share, or the bound that the lengths of the runs put on it."""
        shares, longest = self.shares, self.muon[0][-1][0]
        never = sum(map(math.isnan, shares))
        if never:
            return f"over {longest:.0%} in {never} of {len(shares)} seeds"
        is_bound = any(
            x == path[0][0] for x, path in zip(shares, self.muon, strict=True)
        )
        return ("at most " if is_bound else "") + self.share.show(".0%")


COLUMNS = ["AdamW's loss", "Muon's loss", "Muon's tokens over AdamW's"]
CAPTION = "Losses in nats per byte, ± the 95 % interval."


def measure(
    lab: Lab, plan: Plan, pair: Pair, muon: Sequence[Run], seeds: int
) -> Outcome:
    """`muon` are its runs of every length."""
    runs = [reported(plan, run, seeds) for run in (pair.adamw, *muon)]
    adamw, *by_length = lab.gather(dict(enumerate(runs))).values()
    paths = [
        [
            (step / pair.muon.steps, loss)
            for r in of_seed
            for step, _, loss in r["curve"]
        ]
        for of_seed in zip(*by_length, strict=True)
    ]
    return Outcome(pair, losses(adamw), paths)


def lengths(run: Run, shares: Sequence[float] = SHARES) -> list[Run]:
    """Under a constant rate one run has them all."""
    shares = (1.0,) if run.schedule == "constant" else shares
    return [run.but(steps=round(share * run.steps)) for share in shares]


def reported(plan: Plan, run: Run, seeds: int) -> list[Run]:
    evaluations = EVALUATIONS if run.schedule == "constant" else 1
    return plan.over_seeds(run.but(evaluations=evaluations), seeds)


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

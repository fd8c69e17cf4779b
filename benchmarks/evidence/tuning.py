"""Finds the learning rates and weight decay of AdamW and Muon on a grid, by walking."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .lab import Lab, losses
from .plan import Plan
from .run import Run


RATES = tuple(1e-3 * 2**i for i in range(-3, 10))
DECAYS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)
GRID = dict(learning_rate=RATES, weight_decay=DECAYS, adam_learning_rate=RATES)
AXES = ("learning_rate", "weight_decay")


class Pair(NamedTuple):
    """AdamW and Muon, each at its best for one corpus, model and schedule."""

    adamw: Run
    muon: Run


def tuned_pair(lab: Lab, plan: Plan, corpus: str, **settings: Any) -> Pair:
    """Muon's AdamW side keeps AdamW's best rate."""
    adamw = plan.run(corpus, optimizer="adamw", learning_rate=8e-3, **settings)
    adamw = tuned(lab, adamw)
    muon = plan.run(corpus, learning_rate=1.6e-2, **settings)
    return Pair(adamw, tuned(lab, muon.but(adam_learning_rate=adamw.learning_rate)))


def tuned(lab: Lab, run: Run, axes: Sequence[str] = AXES) -> Run:
    """The best of the grid by the loss on the part to tune on.

    Walks from the run's own place to its best neighbour as long as there is a better
    one, so that the optimum is bracketed along every axis.
    """
    while True:
        runs = [run, *_beside(run, axes)]
        found = losses(lab.results(runs, kept_in="tuning"), part="tune")
        best = runs[found.index(min(found))]
        if best == run:
            return run
        run = best


def _beside(run: Run, axes: Sequence[str]) -> Iterator[Run]:
    """The neighbours along each axis."""
    for axis in axes:
        values = GRID[axis]
        here = values.index(getattr(run, axis))
        for value in values[max(0, here - 1) : here] + values[here + 1 : here + 2]:
            yield run.but(**{axis: value})

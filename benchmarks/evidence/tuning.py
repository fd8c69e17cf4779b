"""Finds the learning rate and weight decay of AdamW and Muon on a grid, by walking."""

from typing import Any, NamedTuple

from .lab import Lab, losses
from .plan import Plan
from .run import Run


RATES = tuple(1e-3 * 2**i for i in range(-3, 10))
DECAYS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)
Point = tuple[int, int]  # places in RATES and DECAYS


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


def tuned(lab: Lab, run: Run) -> Run:
    """The best of the grid by the loss on the part to tune on.

    Walks from the run's own learning rate and weight decay to its best neighbour as
    long as there is a better one, so that the optimum is bracketed along both axes.
    """
    here = RATES.index(run.learning_rate), DECAYS.index(run.weight_decay)
    while True:
        points = [here, *_cross(here)]
        results = lab.results([_at(run, point) for point in points], kept_in="tuning")
        found = losses(results, part="tune")
        best = points[found.index(min(found))]
        if best == here:
            return _at(run, here)
        here = best


def _at(run: Run, point: Point) -> Run:
    return run.but(learning_rate=RATES[point[0]], weight_decay=DECAYS[point[1]])


def _cross(point: Point) -> list[Point]:
    """The neighbours along both axes."""
    rate, decay = point
    rates, decays = range(len(RATES)), range(len(DECAYS))
    beside = [
        (rate - 1, decay),
        (rate + 1, decay),
        (rate, decay - 1),
        (rate, decay + 1),
    ]
    return [(r, d) for r, d in beside if r in rates and d in decays]

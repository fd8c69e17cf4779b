"""Finds the learning rates and weight decay of AdamW and Muon on a grid."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from walk import neighbors, walk

from .lab import Lab, losses
from .plan import Plan
from .run import Run


RATES = tuple(1e-3 * 2**i for i in range(-3, 10))
DECAYS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)
BETAS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
GRID = dict(
    learning_rate=RATES,
    weight_decay=DECAYS,
    adam_learning_rate=RATES,
    beta=BETAS,
    b2=(0.9, 0.95, 0.98, 0.99, 0.995, 0.999),
)
AXES = ("learning_rate", "weight_decay")


class Pair(NamedTuple):
    """AdamW and Muon, each at its best for one corpus, model and schedule."""

    adamw: Run
    muon: Run


def tuned_pair(lab: Lab, plan: Plan, corpus: str, **settings: Any) -> Pair:
    """AdamW's parameters under Muon keep AdamW's best rate."""
    adamw = plan.run(corpus, optimizer="adamw", learning_rate=8e-3, **settings)
    adamw = tuned(lab, adamw)
    muon = plan.run(corpus, learning_rate=1.6e-2, **settings)
    return Pair(adamw, tuned(lab, muon.but(adam_learning_rate=adamw.learning_rate)))


def tuned(
    lab: Lab,
    run: Run,
    axes: Sequence[str] = AXES,
    *,
    one_rate: bool = False,
    grid: Mapping[str, Sequence[Any]] = GRID,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
) -> Run:
    """The best of the grid by the loss on the part to tune on, from the run's place.

    With `one_rate` AdamW's parameters have Muon's learning rate. With `seeds` the mean
    loss over these decides, else that of the run's own seed. The walk ends after so
    many `rounds`, if they are given.
    """
    seeds = [run.seed] if seeds is None else seeds

    def near(run: Run) -> Iterator[Run]:
        for axis in axes:
            for value in neighbors(grid[axis], getattr(run, axis)):
                is_rate = one_rate and axis == "learning_rate"
                one = dict(adam_learning_rate=value) if is_rate else {}
                yield run.but(**one | {axis: value})

    def measured(runs: list[Run]) -> list[float]:
        repeated = [run.but(seed=seed) for run in runs for seed in seeds]
        found = losses(lab.results(repeated, kept_in="tuning"), part="tune")
        return np.reshape(found, (len(runs), len(seeds))).mean(axis=1).tolist()

    return walk(run, near, measured, rounds)

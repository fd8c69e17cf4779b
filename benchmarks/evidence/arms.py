"""Tuned arms: the best run of each, repeated over seeds."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from .intervals import Interval, paired
from .lab import Lab, losses, Result
from .plan import Plan
from .run import Run


Key = TypeVar("Key")


class Trained(NamedTuple):
    """All arms of one text, model or task, by what names them."""

    best: Mapping[Any, Run]
    results: Mapping[Any, list[Result]]

    def losses(self, arm: Any) -> list[float]:
        """After all steps, seed by seed."""
        return losses(self.results[arm])

    def over(self, arm: Any, base: Any) -> Interval:
        """The loss of an arm over that of another."""
        return paired(self.losses(arm), self.losses(base))


def train(
    lab: Lab, plan: Plan, best: Mapping[Key, Mapping[Any, Run]], seeds: int
) -> dict[Key, Trained]:
    """Repeats the best runs of all arms, all of them together."""
    runs = {
        (key, arm): plan.over_seeds(run, seeds)
        for key, of in best.items()
        for arm, run in of.items()
    }
    results = lab.gather(runs)
    return {
        key: Trained(of, {arm: results[key, arm] for arm in of})
        for key, of in best.items()
    }

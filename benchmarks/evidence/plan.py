"""How much of an experiment is run: corpora, seeds and lengths."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .run import Run
from .texts import CHECK, CORPORA


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The full experiments, or with `quick` all of the code and no evidence."""

    corpora: Sequence[str] = tuple(CORPORA)
    figures: Path = Path("figures")
    quick: bool = False
    first_seed: int = 1  # that of tuning is 0

    @property
    def all_corpora(self) -> Sequence[str]:
        """Those of the experiments; alongside the usual ones that of the check."""
        usual = list(self.corpora) == list(CORPORA)
        return [*self.corpora, *(CHECK if usual else ())]

    def seeds(self, count: int) -> range:
        """Returns the seeds of the runs that are reported."""
        return range(self.first_seed, self.first_seed + (2 if self.quick else count))

    def some(self, settings: Sequence[T]) -> Sequence[T]:
        """Returns all settings, or with `quick` the first and the last."""
        return [settings[0], settings[-1]] if self.quick else settings

    def axes(self, axes: Sequence[T]) -> Sequence[T]:
        """Returns what to tune, or with `quick` the first of it."""
        return axes[:1] if self.quick else axes

    def run(self, corpus: str, **settings: Any) -> Run:
        run = Run(corpus=corpus, **settings)
        if not self.quick:
            return run
        small = dict(batch=run.batch // 2, context=32, layers=min(run.layers, 2))
        return run.but(steps=max(20, run.steps // 20), **small)

    def over_seeds(self, run: Run, count: int) -> list[Run]:
        return [run.but(seed=seed) for seed in self.seeds(count)]

    def arms(
        self, arms: Mapping[str, Mapping[str, Any]], count: int, **settings: Any
    ) -> dict[tuple[str, str], list[Run]]:
        """Returns the runs of all seeds, by corpus and by arm of changed settings."""
        return {
            (corpus, arm): self.over_seeds(
                self.run(corpus, **settings | dict(changes)), count
            )
            for corpus in self.corpora
            for arm, changes in arms.items()
        }

"""Whether the beta that is best in short runs is best in longer ones."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pictures import panels
from tables import Table

from ..intervals import Interval, paired
from ..lab import Lab, losses
from ..optimizers import RISE
from ..plan import Plan
from ..recipe import MUON, MUON_AXES
from ..run import Run
from ..section import Section
from ..style import losses_over
from ..tuning import tuned
from . import recipes


SEEDS, COMMON, HARM = 3, 0.95, 0.02  # in nats
TIMES = (1, 4)  # the steps of the experiment on recipes
ARMS: dict[str, dict[str, Any]] = {
    f"{COMMON}": dict(beta=COMMON),
    f"rising from 0.85 to {COMMON}": dict(beta=COMMON, beta_from=0.85),
}

Key = tuple[str, int, str]  # corpus, steps, arm


class Measured(NamedTuple):
    """The best settings, with a momentum that is common and with any constant."""

    common: Run
    best: Run
    common_losses: list[float]
    best_losses: list[float]

    @property
    def lost(self) -> Interval:
        return paired(self.common_losses, self.best_losses)


def experiment(lab: Lab, plan: Plan) -> Section:
    found = {
        key: measured
        for corpus in plan.corpora
        for key, measured in measure(lab, plan, corpus)
    }
    draw(plan, found)
    steps = sorted({steps for _, steps, _ in found})
    return Section(
        title="Momentum by length",
        claim="beta = 0.95, as Keller Jordan, Moonlight (arXiv:2502.16982) and Kimi K2 "
        "(arXiv:2507.20534) have it. In modded-nanogpt it rises from 0.85 to 0.95 over "
        f"the first {RISE} steps.",
        setting="The smaller model of the experiment on recipes, for as many steps and "
        "for four times as many. Everything is tuned again by a walk: learning rate, "
        "weight decay, the rate of Muon's AdamW side, and for the best also beta. "
        f"{SEEDS} seeds.",
        tables=[table(found)],
        parts={
            f"{arm} within {HARM} nats of the best beta in {count:,} steps": [
                measured.lost.high <= HARM
                for (_, of, its), measured in found.items()
                if (of, its) == (count, arm)
            ]
            for count, arm in itertools.product(steps, ARMS)
        },
        figure="momentum_by_length.png",
        remarks="It counts as reproduced if, on every corpus and for both lengths, it "
        f"costs at most {HARM} nats, interval included.",
    )


def measure(lab: Lab, plan: Plan, corpus: str) -> Iterator[tuple[Key, Measured]]:
    short = next(iter(recipes.walks(lab, plan, corpus).values()))[MUON]
    others = [axis for axis in MUON_AXES if axis != "beta"]
    for times in TIMES:
        start = short.but(steps=short.steps * times)
        commons = {
            arm: tuned(lab, start.but(**changes), plan.axes(others))
            for arm, changes in ARMS.items()
        }
        best = tuned(lab, start, plan.axes(MUON_AXES))
        runs = {run: plan.over_seeds(run, SEEDS) for run in (*commons.values(), best)}
        ends = {run: losses(results) for run, results in lab.gather(runs).items()}
        for arm, common in commons.items():
            key = corpus, start.steps, arm
            yield key, Measured(common, best, ends[common], ends[best])


def table(found: dict[Key, Measured]) -> Table:
    columns = ["corpus", "steps", "beta", "rate, decay, AdamW side"]
    columns += ["best beta", "rate, decay, AdamW side there", "loss over the best's"]
    entries = [
        [
            corpus,
            f"{steps:,}",
            arm,
            shown(m.common),
            f"{m.best.beta:g}",
            shown(m.best),
            m.lost.difference(),
        ]
        for (corpus, steps, arm), m in found.items()
    ]
    return Table(columns, entries, "In nats per byte, with the 95 % interval.")


def shown(run: Run) -> str:
    others = (run.learning_rate, run.weight_decay, run.adam_learning_rate)
    return ", ".join(f"{value:.2g}" for value in others)


def draw(plan: Plan, found: dict[Key, Measured]) -> None:
    file = plan.figures / "momentum_by_length.png"
    label = "loss over the best beta's, nats per byte"
    with panels(file, plan.corpora, xlabel=label) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=True):
            means = {
                f"{steps:,} steps:\n{arm}": m.lost
                for (of, steps, arm), m in found.items()
                if of == corpus
            }
            losses_over(one, means, HARM)

"""Whether the beta that is best in short runs is best in longer ones."""

from collections.abc import Iterator
from typing import NamedTuple

from pictures import picture
from tables import Table

from ..intervals import Interval, paired
from ..lab import Lab, losses
from ..plan import Plan
from ..recipe import MUON, MUON_AXES
from ..run import Run
from ..section import Section
from ..style import CYCLE
from ..tuning import tuned
from . import recipes


SEEDS, COMMON, HARM = 3, 0.95, 0.02  # in nats
TIMES = (1, 4)  # the steps of the experiment on recipes

Key = tuple[str, int]  # corpus, steps


class Measured(NamedTuple):
    """The best settings, with the momentum that is common and with any."""

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
    steps = sorted({steps for _, steps in found})
    return Section(
        title="Momentum by length",
        claim="beta = 0.95, as Keller Jordan, Moonlight (arXiv:2502.16982) and Kimi K2 "
        "(arXiv:2507.20534) have it.",
        setting="The smaller model of the experiment on recipes, for as many steps and "
        "for four times as many. Everything is tuned again by a walk: learning rate, "
        "weight decay, the rate of Muon's AdamW side, and in one arm beta. "
        f"{SEEDS} seeds.",
        tables=[table(found)],
        parts={
            f"{COMMON} within {HARM} nats of the best beta in {count:,} steps": [
                measured.lost.high <= HARM
                for (_, of), measured in found.items()
                if of == count
            ]
            for count in steps
        },
        figure="momentum_by_length.png",
        remarks=f"It counts as reproduced if, on every corpus and for both lengths, "
        f"{COMMON} costs at most {HARM} nats, interval included.",
    )


def measure(lab: Lab, plan: Plan, corpus: str) -> Iterator[tuple[Key, Measured]]:
    short = next(iter(recipes.walks(lab, plan, corpus).values()))[MUON]
    others = [axis for axis in MUON_AXES if axis != "beta"]
    for times in TIMES:
        start = short.but(steps=short.steps * times)
        common = tuned(lab, start.but(beta=COMMON), plan.axes(others))
        best = tuned(lab, start, plan.axes(MUON_AXES))
        runs = {run: plan.over_seeds(run, SEEDS) for run in (common, best)}
        ends = {run: losses(results) for run, results in lab.gather(runs).items()}
        yield (corpus, start.steps), Measured(common, best, ends[common], ends[best])


def table(found: dict[Key, Measured]) -> Table:
    columns = ["corpus", "steps", f"beta = {COMMON}: rate, decay, AdamW side"]
    columns += ["best beta", "rate, decay, AdamW side", f"loss lost by {COMMON}"]
    entries = [
        [
            corpus,
            f"{steps:,}",
            shown(m.common),
            f"{m.best.beta:g}",
            shown(m.best),
            m.lost.difference(),
        ]
        for (corpus, steps), m in found.items()
    ]
    return Table(columns, entries, "In nats per byte, with the 95 % interval.")


def shown(run: Run) -> str:
    others = (run.learning_rate, run.weight_decay, run.adam_learning_rate)
    return ", ".join(f"{value:.2g}" for value in others)


def draw(plan: Plan, found: dict[Key, Measured]) -> None:
    file = plan.figures / "momentum_by_length.png"
    label = f"nats per byte lost by beta = {COMMON}"
    with picture(file, xlabel="steps", ylabel=label) as axes:
        for corpus, color in zip(plan.corpora, CYCLE, strict=False):
            lost = {s: m.lost for (of, s), m in found.items() if of == corpus}
            means, halves = zip(*lost.values(), strict=True)
            axes.errorbar(list(lost), means, halves, fmt="o-", label=corpus, c=color)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks(sorted({steps for _, steps in found}))

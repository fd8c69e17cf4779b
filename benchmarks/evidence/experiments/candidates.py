"""Candidates of the field, each against the default alone: which of them pay."""

from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..arms import train, Trained
from ..candidates import GAINS
from ..intervals import Interval, interval
from ..lab import Lab
from ..plan import Plan
from ..recipe import DEFAULT as ONE_RATE
from ..recipe import HEADS, NEURONS, START
from ..run import Run
from ..section import Section
from ..style import CYCLE, losses_over
from ..tuning import GRID, tuned
from .defaults import RISING


SEEDS, EVALUATIONS = 5, 10
MODEL = dict(layers=2, width=32, heads=2)
DEFAULT, SAMUON, HYPERBALL = "default", "SAMuon-lite", "hyperball"
ALONE: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "NorMuon": dict(muon=(NEURONS,)),
    SAMUON: dict(candidate=list(GAINS)[1]),
    "Sinkhorn": dict(candidate="sinkhorn"),
    "squared decay": dict(candidate="squared decay"),
    HYPERBALL: dict(candidate="hyperball"),
}
# A fixed norm changes what a schedule does, so that it needs the default without one.
ARMS = ALONE | {
    f"{arm}, constant rate": ALONE[arm] | dict(schedule="constant")
    for arm in (DEFAULT, HYPERBALL)
}
# Each candidate, and the default under its schedule.
BASES = {
    arm: arm.replace(HYPERBALL, DEFAULT) if arm.startswith(HYPERBALL) else DEFAULT
    for arm in ARMS
    if not arm.startswith(DEFAULT)
}


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    draw(plan, found)
    return Section(
        title="Candidates",
        claim="NorMuon (arXiv:2510.05491): neurons normalized. SAMuon-lite "
        "(arXiv:2608.25990): 13 to 24 % fewer tokens if the step along the momentum's "
        "first singular direction is held back, by `g` from 1.2 to 2. DeepSeek V4.1: a "
        "step of even rows and columns (Sinkhorn) for embedding and head. Decay that "
        "falls as the rate does, in addition to the rate (arXiv:2607.23777). Hyperball "
        "(arXiv:2606.16899): matrices of a fixed norm save 20 to 30 % of the tokens; "
        "schedules explain much of that (arXiv:2607.22444).",
        setting="24,576 matrix parameters, 400 steps of 1,024 bytes, cosine schedule "
        "but for two arms. The default, `mc.muonclip(learning_rate)`, and one "
        "candidate with it. Of every arm the one learning rate is "
        f"tuned, and SAMuon-lite's `g` in {', '.join(gain(x) for x in GAINS)}. "
        f"{SEEDS} seeds.",
        tables=[gain_table(found), loss_table(found)],
        parts={
            f"{arm}: a lower loss": [gained(m, arm).high < 0 for m in found.values()]
            for arm in BASES
        },
        figure="candidates.png",
        remarks="A candidate pays if it lowers the loss beyond its interval on every "
        "text. SAMuon-lite's power iteration begins at the momentum's longest row, "
        "for where the authors begin is not known here. The hyperball holds every "
        "matrix, of a head too, at the norm that it was drawn with.",
    )


def measured(lab: Lab, plan: Plan) -> dict[str, Trained]:
    best = {corpus: walk(lab, plan, corpus) for corpus in plan.all_corpora}
    return train(lab, plan, best, SEEDS)


def walk(lab: Lab, plan: Plan, corpus: str) -> dict[str, Run]:
    best: dict[str, Run] = {}
    for arm, changes in ARMS.items():
        if DEFAULT in best:
            start = best[BASES.get(arm, DEFAULT)].but(**changes)
        else:
            told = START[ONE_RATE] | MODEL | RISING | HEADS | changes
            start = plan.run(corpus, **told)
        axes = ("learning_rate", "candidate") if arm == SAMUON else ("learning_rate",)
        grid = GRID | dict(candidate=list(GAINS))
        best[arm] = tuned(lab, start, plan.axes(axes), one_rate=True, grid=grid)
    return {arm: run.but(evaluations=EVALUATIONS) for arm, run in best.items()}


def gained(trained: Trained, arm: str) -> Interval:
    """The loss of a candidate over that of its base."""
    return trained.over(arm, BASES[arm])


def gain_table(found: dict[str, Trained]) -> Table:
    entries = [
        [arm, *(gained(m, arm).difference() for m in found.values()), pays(found, arm)]
        for arm in BASES
    ]
    caption = "What each candidate adds to the loss of the default under the same "
    caption += "schedule, in nats per byte, with the 95 % interval; negative is better."
    return Table(["", *found, "pays"], entries, caption)


def pays(found: dict[str, Trained], arm: str) -> str:
    return "yes" if all(gained(m, arm).high < 0 for m in found.values()) else "no"


def loss_table(found: dict[str, Trained]) -> Table:
    entries = [
        [
            corpus,
            arm,
            interval(m.losses(arm)).show(),
            f"{run.learning_rate:.2g}",
            gain(run.candidate) if arm == SAMUON else "-",
        ]
        for corpus, m in found.items()
        for arm, run in m.best.items()
    ]
    caption = "Losses in nats per byte after all steps, and what the walks found."
    return Table(["corpus", "", "loss", "rate", "g"], entries, caption)


def gain(candidate: str) -> str:
    return candidate.split()[-1]


def draw(plan: Plan, found: dict[str, Trained]) -> None:
    """Curves of the mean loss above, and below what is left of them at the end."""
    titles = [*found, *(f"{corpus}: over the default" for corpus in found)]
    with panels(plan.figures / "candidates.png", titles, rows=2) as axes:
        for one, measured in zip(axes, found.values(), strict=False):
            for arm, color in zip(ALONE, CYCLE, strict=False):
                curves = [result["curve"] for result in measured.results[arm]]
                # The first looks are so high that they would hide the last.
                steps, _, loss = np.mean(curves, axis=0)[2:].T
                one.plot(steps, loss, color=color, label=arm, linewidth=1.2)
            one.set(xlabel="step", ylabel="nats per byte")
        for one, measured in zip(axes[len(found) :], found.values(), strict=True):
            losses_over(one, {arm: gained(measured, arm) for arm in BASES})

"""How many steps to warm up, by width and by batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..arms import train, Trained
from ..intervals import Interval
from ..lab import Lab
from ..plan import Plan
from ..section import Section
from ..style import CYCLE
from ..tuning import tuned, tuned_pair
from .token_conditions import LARGE, SMALL


SEEDS, TUNING_SEEDS = 5, (0, 1001, 1002)
USUAL, HARM = 0.05, 0.02  # of the steps, as in all experiments; in nats
SHARES = (0.0, 0.01, USUAL, 0.2)
CONDITIONS: dict[str, dict[str, Any]] = {
    "width 32, 4 sequences": SMALL | dict(batch=4),
    "width 32, 16 sequences": SMALL,
    "width 32, 64 sequences": SMALL | dict(batch=64),
    "width 96, 16 sequences": LARGE,
}

Key = tuple[str, str]  # corpus, condition


def lost(m: Trained) -> Interval:
    """By the usual share, over the best one."""
    return m.over(USUAL, min(SHARES, key=lambda share: np.mean(m.losses(share))))


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    draw(plan, found)
    return Section(
        title="Warm-up",
        claim="Kimi K2 (arXiv:2507.20534) warms up over 500 steps, far fewer than a "
        "twentieth; all other experiments here take a twentieth.",
        setting="Models of the experiments on tokens, 400 steps, where weight decay "
        "and the rate of AdamW's parameters are those found there. The rate rises from "
        "zero in a straight line over a share of the steps, for all, and the "
        "cosine begins after it. The learning rate is tuned anew for each share, by "
        f"the mean of {len(TUNING_SEEDS)} seeds. {SEEDS} seeds.",
        tables=[rate_table(found), loss_table(found)],
        parts={
            f"a twentieth within {HARM} nats of the best share": [
                lost(m).high <= HARM for m in found.values()
            ]
        },
        figure="warm_up.png",
        remarks="It counts as reproduced if, on every corpus and under every "
        f"condition, a warm-up of a twentieth loses at most {HARM} nats to the best "
        "share, interval included.",
    )


def measured(lab: Lab, plan: Plan) -> dict[Key, Trained]:
    """By the share of the steps."""
    best, seeds = {}, plan.some(TUNING_SEEDS)
    for corpus in plan.corpora:
        for condition, settings in CONDITIONS.items():
            usual = tuned_pair(lab, plan, corpus, **settings).muon
            starts = {share: usual.but(warm_up=share) for share in SHARES}
            best[corpus, condition] = {
                share: tuned(lab, run, ("learning_rate",), seeds=seeds)
                for share, run in starts.items()
            }
    return train(lab, plan, best, SEEDS)


def rate_table(found: dict[Key, Trained]) -> Table:
    entries = [
        [*key, *(f"{run.learning_rate:.2g}" for run in measured.best.values())]
        for key, measured in found.items()
    ]
    return Table(columns(), entries, "Best learning rate by share of the steps.")


def loss_table(found: dict[Key, Trained]) -> Table:
    entries = [
        [*key, *(shown(measured, share) for share in SHARES)]
        for key, measured in found.items()
    ]
    caption = (
        f"Loss over that with {USUAL:.0%}, in nats per byte, with the 95 % interval; "
        "negative is better."
    )
    return Table(columns(), entries, caption)


def columns() -> Sequence[str]:
    return ["corpus", "", *(f"{share:.0%}" if share else "none" for share in SHARES)]


def shown(m: Trained, share: float) -> str:
    return "-" if share == USUAL else m.over(share, USUAL).difference()


def draw(plan: Plan, found: dict[Key, Trained]) -> None:
    label = f"nats per byte over a warm-up of {USUAL:.0%}"
    file = plan.figures / "warm_up.png"
    x = "warm-up, share of the steps"
    with panels(file, plan.corpora, xlabel=x, ylabel=label) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=True):
            for i, (condition, color) in enumerate(
                zip(CONDITIONS, CYCLE, strict=False)
            ):
                of = found[corpus, condition]
                points = [of.over(share, USUAL) for share in SHARES]
                places = np.arange(len(SHARES)) + 0.06 * i
                means, halves = zip(*points, strict=True)
                bars = np.nan_to_num(halves)
                one.errorbar(places, means, bars, fmt="o-", c=color, label=condition)
            one.axhline(0, color="black", linewidth=0.8)
            one.set_xticks(range(len(SHARES)), columns()[2:])

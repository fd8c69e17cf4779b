"""Whether Muon trains policies: PPO on two environments, GRPO on brackets."""

from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..arms import train, Trained
from ..intervals import Interval, interval, paired
from ..lab import Lab
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import band, CYCLE
from ..tuning import RATES, tuned
from .rate_rule import RULE, rule


SEEDS, TUNING_SEEDS = 10, (0, 1001, 1002)
ADAMW, MUON, RULED, HIGH = "AdamW", "Muon", "Muon, the rule's rate", "high-pass"
# Nothing decays; the rate falls to 0, as is usual for both algorithms.
ALIKE: dict[str, Any] = dict(weight_decay=0.0, schedule="linear", warm_up=0.0)
ALIKE |= dict(statistics=False, corpus="prose")
ARMS: dict[str, dict[str, Any]] = {
    ADAMW: dict(optimizer="adamw", learning_rate=2e-3, b2=0.999),
    MUON: dict(learning_rate=4e-3, adam_learning_rate=4e-3, beta=0.95),
    HIGH: dict(
        learning_rate=4e-3, adam_learning_rate=4e-3, beta=0.95, candidate="high-pass"
    ),
}
PLAIN = dict(model="mlp", width=64, steps=300)
ATTENDS = dict(model="attention", width=32, heads=2, steps=150)
TASKS: dict[str, dict[str, Any]] = {
    "cart-pole, two hidden matrices": PLAIN | dict(task="CartPole-v1"),
    "cart-pole, attention": ATTENDS | dict(task="CartPole-v1"),
    "acrobot, two hidden matrices": PLAIN | dict(task="Acrobot-v1"),
    "acrobot, attention": ATTENDS | dict(task="Acrobot-v1"),
    "brackets, GRPO": dict(task="brackets", steps=150, layers=2, width=32, heads=2),
}
BASES = (ADAMW, MUON, RULED, HIGH)
GRID = dict(learning_rate=RATES)


def rewards(m: Trained, arm: str) -> list[float]:
    """The mean reward in the last tenth of the updates, seed by seed."""
    return [-loss for loss in m.losses(arm)]


def gained(m: Trained, arm: str, base: str = ADAMW) -> Interval:
    return paired(rewards(m, arm), rewards(m, base))


def collapses(m: Trained, arm: str) -> int:
    """In how many seeds the end is less than halfway up from start to summit."""
    curves = [-np.array(r["curve"])[:, 2] for r in m.results[arm]]
    ends = (c[-1] < (c[0] + c.max()) / 2 and c.argmax() > 0 for c in curves)
    return sum(map(bool, ends))


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    draw(plan, found)
    over = {name: gained(m, MUON) for name, m in found.items()}
    high = {name: gained(m, HIGH, MUON) for name, m in found.items()}
    collapsed = {arm: sum(collapses(m, arm) for m in found.values()) for arm in BASES}
    return Section(
        title="Reinforcement learning",
        claim="Pion (arXiv:2605.19282): in reinforcement learning with rewards that "
        "can be verified Muon collapses where AdamW does not, since noise is made as "
        "large as signal; a polynomial that sends small singular values to 0 repairs "
        "it.",
        setting="PPO on gymnax's `CartPole-v1` and `Acrobot-v1`, from the last four "
        "observations, by a network of two hidden matrices of width 64 (300 updates) "
        "or with a block of attention of width 32 (150 updates): 1,024 steps an "
        "update, 4 epochs of 4 batches. GRPO on "
        "brackets of two kinds: four are open, eight tokens are to close all in "
        "order, 16 prompts with 16 answers, 150 updates, from drawn weights. Nothing "
        "decays, rates fall to 0. AdamW (b2 0.999), Muon and Muon by the high-pass "
        "polynomial have one rate each, tuned over "
        f"{len(TUNING_SEEDS)} seeds by the reward of the last tenth; a fourth arm "
        f"takes the rule's: {RULE}. {SEEDS} other seeds.",
        tables=[table(found)],
        parts={
            "Muon ends lower than AdamW": [d.high < 0 for d in over.values()],
            "the high-pass polynomial ends higher than Muon": [
                d.low > 0 for d in high.values()
            ],
        },
        figure="reinforcement.png",
        remarks="By the interval of the difference, paired by seed. A run counts as "
        "collapsed if it ends less than halfway up from its first tenth to its best: "
        + ", ".join(f"{n} ({arm})" for arm, n in collapsed.items())
        + f" of {len(found) * len(rewards(next(iter(found.values())), ADAMW))}.",
        answer="With tuned rates, Muon's reward ends above AdamW's, beyond the "
        f"interval, in {sum(d.low > 0 for d in over.values())} of {len(over)} tasks "
        f"and below it in {sum(d.high < 0 for d in over.values())}. With twice AdamW's "
        "rate, untuned, it ends below in "
        f"{sum(gained(m, RULED).high < 0 for m in found.values())}. "
        f"{collapsed[MUON]} of tuned Muon's and {collapsed[ADAMW]} of AdamW's runs "
        "collapsed. Pion's high-pass polynomial ends above Muon in "
        f"{sum(d.low > 0 for d in high.values())} tasks and below it in "
        f"{sum(d.high < 0 for d in high.values())}.",
        limits="Pretrained language models with long answers, where Pion saw the "
        "collapse; continuous actions; many environments.",
    )


def measured(lab: Lab, plan: Plan) -> dict[str, Trained]:
    best = {name: walk(lab, plan, TASKS[name]) for name in plan.some(list(TASKS))}
    return train(lab, plan, best, SEEDS)


def walk(lab: Lab, plan: Plan, task: dict[str, Any]) -> dict[str, Run]:
    best: dict[str, Run] = {}
    for arm, changes in ARMS.items():
        best[arm] = tuned(
            lab,
            plan.run(**ALIKE | task | changes),
            ("learning_rate",),
            one_rate=arm != ADAMW,
            grid=GRID,
            seeds=TUNING_SEEDS[: 1 if plan.quick else None],
        )
    rate = rule(best[ADAMW].learning_rate)
    best[RULED] = best[MUON].but(learning_rate=rate, adam_learning_rate=rate)
    return best


def table(found: dict[str, Trained]) -> Table:
    entries = [
        [
            name,
            arm,
            interval(rewards(m, arm)).show(".3g"),
            "-" if arm == ADAMW else gained(m, arm).show("+.3g"),
            "-" if arm != HIGH else gained(m, HIGH, MUON).show("+.3g"),
            f"{collapses(m, arm)} of {len(m.results[arm])}",
            f"{m.best[arm].learning_rate:.2g}",
        ]
        for name, m in found.items()
        for arm in BASES
    ]
    columns = ["task", "", "reward at the end", "over AdamW's", "over Muon's"]
    columns += ["collapsed", "rate"]
    caption = "Rewards of an episode, or the share of brackets that are closed."
    return Table(columns, entries, caption)


def draw(plan: Plan, found: dict[str, Trained]) -> None:
    file, label = plan.figures / "reinforcement.png", "updates"
    lines = 2 if len(found) > 3 else 1
    titles = [*found, *[""] * (-len(found) % lines)]
    with panels(file, titles, rows=lines, xlabel=label, ylabel="reward") as axes:
        for one, m in zip(axes, found.values(), strict=False):
            for arm, color in zip(BASES, CYCLE, strict=False):
                curves = np.array([r["curve"] for r in m.results[arm]])
                band(one, curves[0, :, 0], -curves[..., 2], color=color, label=arm)
        for one in axes[len(found) :]:
            one.set_axis_off()

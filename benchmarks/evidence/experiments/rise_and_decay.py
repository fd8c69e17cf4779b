"""The largest logit over a whole training: it rises, stays at the cap and decays."""

from typing import Any

import numpy as np
from pictures import panels

from ..intervals import interval
from ..lab import Lab, losses, Result
from ..plan import Plan
from ..run import Run
from ..section import Section, Table, verdict
from ..style import band, CYCLE
from .explosion import smooth, WINDOW


STEPS, SEEDS = 3000, 3
ARMS = {"threshold 30": 30.0, "no clip": float("inf")}


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = lab.gather(
        {
            (corpus, arm): runs(plan, corpus, threshold)
            for corpus in plan.corpora
            for arm, threshold in ARMS.items()
        }
    )
    draw(plan, arms)
    clipped = [arms[corpus, "threshold 30"] for corpus in plan.corpora]
    columns = ["corpus", "", "largest logit", "at the end", "heads ever over 30"]
    columns += ["first step over", "last step over", "final loss"]
    return Section(
        title="Rise, cap and decay",
        claim="Kimi K2 (arXiv:2507.20534, figure 2 and appendix D): the largest "
        "logit rises to the threshold, stays there, and decays after about 30 % of "
        "the steps; 12.7 % of the heads ever exceed it, none after 70,000 of 220,000 "
        "steps (32 %).",
        setting=f"3 layers of width 64, 4 heads, {STEPS} steps: warm-up over a "
        "twentieth, a constant rate of 0.032, linear decay over the last fifth; "
        f"weight decay 0.1, threshold 30; {SEEDS} seeds.",
        tables=[Table(columns, [row(*key, results) for key, results in arms.items()])],
        verdict=verdict(
            part
            for results in clipped
            for part in (capped(results), decayed(results), stopped(results))
        ),
        figure="rise_and_decay.png",
        remarks="It counts as reproduced if, on every corpus, the logits come to the "
        "threshold, end below it, and no head exceeds it in the last tenth of the "
        "steps.",
    )


def runs(plan: Plan, corpus: str, threshold: float) -> list[Run]:
    run = plan.run(
        corpus,
        steps=STEPS,
        schedule="decay",
        learning_rate=3.2e-2,
        adam_learning_rate=8e-3,
        threshold=threshold,
        probe="steps",
    )
    return list(plan.over_seeds(run, SEEDS))


def capped(results: list[Result]) -> bool:
    return all(result["fired"] > 0 for result in results)


def decayed(results: list[Result]) -> bool:
    return all(np.mean(result["logits"][-20:]) < 30.0 for result in results)


def stopped(results: list[Result]) -> bool:
    return all(
        np.max(result["last_fired"]) <= 0.9 * len(result["logits"])
        for result in results
    )


def row(corpus: str, arm: str, results: list[Result]) -> list[str]:
    logits = np.array([result["logits"] for result in results])
    over = logits > 30.0
    first = [1 + int(np.argmax(steps)) for steps in over if steps.any()]
    last = [len(steps) - int(np.argmax(steps[::-1])) for steps in over if steps.any()]
    return [
        corpus,
        arm,
        f"{logits.max(axis=1).mean():.1f}",
        f"{logits[:, -20:].mean():.1f}",
        heads_ever_over(results),
        f"{np.mean(first):,.0f}" if first else "-",
        f"{np.mean(last):,.0f}" if last else "-",
        interval(losses(results)).show(),
    ]


def heads_ever_over(results: list[Result]) -> str:
    fired = [np.array(result["last_fired"]) > 0 for result in results]
    return f"{np.mean(fired):.0%}" if np.any(fired) else "-"


def draw(plan: Plan, arms) -> None:
    settings: dict[str, Any] = dict(xlabel="step", ylabel="largest logit")
    with panels(plan.figures / "rise_and_decay.png", plan.corpora, **settings) as axes:
        for (corpus, arm), results in arms.items():
            curves = np.array([smooth(result["logits"]) for result in results])
            x = WINDOW * (0.5 + np.arange(curves.shape[1]))
            one = axes[list(plan.corpora).index(corpus)]
            band(one, x, curves, color=CYCLE[1 - list(ARMS).index(arm)], label=arm)
            one.axhline(30, color="black", linewidth=0.8, linestyle=":")

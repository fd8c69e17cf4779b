"""The largest logit over a whole training: it rises, stays at the cap and decays."""

from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..intervals import interval
from ..lab import Lab, losses, Result
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import CYCLE
from .explosion import draw_course, percentiles


STEPS, SEEDS, THRESHOLD = 3000, 3, 30.0
END = 20  # steps
EARLY, FEW = 0.5, 0.5  # of the steps, of the heads
ARMS: dict[str, dict[str, float]] = {
    "threshold 30": dict(threshold=THRESHOLD),
    "no clip": {},
}


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = lab.gather(runs(plan))
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
        parts={
            "logits stay at the threshold": [capped(results) for results in clipped],
            "they fall below it by the end": [decayed(results) for results in clipped],
            f"none is over it after {EARLY:.0%} of the steps": [
                last_over(results) <= EARLY for results in clipped
            ],
            f"at most {FEW:.0%} of the heads ever are": [
                share_of_heads(results) <= FEW for results in clipped
            ],
        },
        figure="rise_and_decay.png",
        remarks="It counts as reproduced if, on every corpus, the logits come to the "
        f"threshold, 95 % of the steps stay within 1.2 of it, the last {END} steps are "
        f"below it, no head exceeds it after {EARLY:.0%} of the steps, and at most "
        f"{FEW:.0%} of the heads ever do. {said(clipped)} The logits fall without the "
        "clip as well: what caps them is the clip, what takes them down is not.",
    )


def runs(plan: Plan) -> dict[tuple[str, str], list[Run]]:
    return plan.arms(
        ARMS,
        SEEDS,
        steps=STEPS,
        schedule="decay",
        learning_rate=3.2e-2,
        adam_learning_rate=8e-3,
        probe="steps",
    )


def capped(results: list[Result]) -> bool:
    fires = all(result["fired"] > 0 for result in results)
    return fires and bool(np.mean(percentiles(results)) <= 1.2 * THRESHOLD)


def decayed(results: list[Result]) -> bool:
    return all(np.mean(result["logits"][-END:]) < THRESHOLD for result in results)


def last_over(results: list[Result]) -> float:
    """The last step with a head over the threshold in any run, as a share of all."""
    return max(np.max(r["last_fired"]) / len(r["logits"]) for r in results)


def said(clipped: list[list[Result]]) -> str:
    heads = " and ".join(f"{share_of_heads(results):.0%}" for results in clipped)
    last = " and ".join(f"{last_over(results):.0%}" for results in clipped)
    return f"Here {heads} of the heads did, the last after {last} of the steps."


def row(corpus: str, arm: str, results: list[Result]) -> list[str]:
    logits = np.array([result["logits"] for result in results])
    over = logits > THRESHOLD
    first = [1 + int(np.argmax(steps)) for steps in over if steps.any()]
    last = [len(steps) - int(np.argmax(steps[::-1])) for steps in over if steps.any()]
    return [
        corpus,
        arm,
        f"{logits.max(axis=1).mean():.1f}",
        f"{logits[:, -END:].mean():.1f}",
        f"{share_of_heads(results):.0%}" if "threshold" in ARMS[arm] else "-",
        f"{np.mean(first):,.0f}" if first else "-",
        f"{np.mean(last):,.0f}" if last else "-",
        interval(losses(results)).show(),
    ]


def share_of_heads(results: list[Result]) -> float:
    """Returns the share of heads that the clip ever scaled."""
    return float(np.mean([np.array(result["last_fired"]) > 0 for result in results]))


def draw(plan: Plan, arms) -> None:
    settings: dict[str, Any] = dict(xlabel="step", ylabel="largest logit")
    with panels(plan.figures / "rise_and_decay.png", plan.corpora, **settings) as axes:
        for (corpus, arm), results in arms.items():
            one = axes[list(plan.corpora).index(corpus)]
            color = CYCLE[1 - list(ARMS).index(arm)]
            draw_course(one, results, "logits", color=color, label=arm)
            one.axhline(THRESHOLD, color="black", linewidth=0.8, linestyle=":")

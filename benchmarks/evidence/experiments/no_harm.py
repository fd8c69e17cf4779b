"""Whether clipping costs loss where training would have gone well without it."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..arms import train, Trained
from ..intervals import Interval
from ..lab import Lab, Result
from ..plan import Plan
from ..section import Section
from ..style import CYCLE
from ..tuning import tuned_pair


THRESHOLDS = (20.0, 10.0, 5.0)
SEEDS, HARM = 8, 0.01


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = trained(lab, plan)
    differences = compared(arms)
    draw(plan, differences)
    columns = ["corpus", "threshold", "largest logit without", "head-clips a run"]
    columns += ["loss difference", "95 % interval"]
    rows = [
        row(corpus, threshold, arms[corpus].results, difference)
        for (corpus, threshold), difference in differences.items()
    ]
    return Section(
        title="No harm",
        claim="Kimi K2 (arXiv:2507.20534, appendix D): an aggressive threshold of 30 "
        "has a negligible effect on the loss of a model of 0.5 B active parameters.",
        setting="3 layers of width 64, 400 steps, cosine schedule, Muon's tuned rate "
        "and weight decay; every threshold is paired with no clip, the same initial "
        f"weights and batches, over {SEEDS} seeds.",
        tables=[
            Table(columns, rows, "Nats per byte; positive is worse with the clip.")
        ],
        parts={
            f"threshold {threshold:g}": [
                d.high < HARM for (_, of), d in differences.items() if of == threshold
            ]
            for threshold in dict.fromkeys(of for _, of in differences)
        },
        figure="no_harm.png",
        remarks=f"It counts as no harm if the interval ends below {HARM:g} nats. "
        + harmful(differences),
    )


def trained(lab: Lab, plan: Plan) -> dict[str, Trained]:
    """By corpus, and there by threshold."""
    best = {corpus: tuned_pair(lab, plan, corpus).muon for corpus in plan.corpora}
    arms = {
        corpus: {x: run.but(threshold=x) for x in (math.inf, *THRESHOLDS)}
        for corpus, run in best.items()
    }
    return train(lab, plan, arms, SEEDS)


def compared(arms: Mapping[str, Trained]) -> dict[tuple[str, float], Interval]:
    """What each threshold does to the loss."""
    return {
        (corpus, threshold): of.over(threshold, math.inf)
        for corpus, of in arms.items()
        for threshold in THRESHOLDS
    }


def harmful(differences: dict[tuple[str, float], Interval]) -> str:
    found = sorted({tau for (_, tau), d in differences.items() if not d.high < HARM})
    if not found:
        return ""
    return f"Too low: {', '.join(f'{threshold:g}' for threshold in found)}."


def row(
    corpus: str, threshold: float, arms: Mapping[Any, list[Result]], change: Interval
) -> list[str]:
    clipped, free = arms[threshold], arms[math.inf]
    return [
        corpus,
        f"{threshold:g}",
        f"{np.mean([r['peak'] for r in free]):.1f}",
        f"{np.mean([r['fired'] for r in clipped]):,.0f}",
        f"{change.mean:+.4f}",
        change.span(),
    ]


def draw(plan: Plan, differences) -> None:
    settings: dict[str, Any] = dict(
        xlabel="threshold", ylabel="loss difference, nats per byte"
    )
    with panels(plan.figures / "no_harm.png", plan.corpora, **settings) as axes:
        for corpus, one in zip(plan.corpora, axes, strict=True):
            points = [differences[corpus, threshold] for threshold in THRESHOLDS]
            x, half = range(len(THRESHOLDS)), [p.half for p in points]
            one.errorbar(x, [p.mean for p in points], half, fmt="o", color=CYCLE[1])
            one.axhline(0, color="black", linewidth=0.8)
            one.axhline(HARM, color="black", linewidth=0.8, linestyle=":")
            one.set_xticks(x, [f"{threshold:g}" for threshold in THRESHOLDS])

"""Whether clipping costs loss where training would have gone well without it."""

import math

from pictures import panels

from ..intervals import Interval, paired
from ..lab import final_loss, Lab, Result
from ..plan import Plan
from ..section import Section, Table, verdict
from ..style import CYCLE
from ..tuning import tuned_pair


THRESHOLDS = (20.0, 10.0, 5.0)
SEEDS, HARM = 8, 0.01


def experiment(lab: Lab, plan: Plan) -> Section:
    differences = {
        (corpus, threshold): difference(lab, plan, corpus, threshold)
        for corpus in plan.corpora
        for threshold in THRESHOLDS
    }
    rows = [
        row(lab, plan, corpus, threshold, differences[corpus, threshold])
        for corpus, threshold in differences
    ]
    columns = ["corpus", "threshold", "largest logit without", "head-clips a run"]
    columns += ["loss difference", "95 % interval"]
    draw(plan, differences)
    return Section(
        title="No harm",
        claim="Kimi K2 (arXiv:2507.20534, appendix D): an aggressive threshold of 30 has "
        "a negligible effect on the loss of a model of 0.5 B active parameters.",
        setting=f"3 layers of width 64, 400 steps, cosine schedule, Muon's tuned rate "
        f"and weight decay; every threshold is paired with no clip, the "
        f"same initial weights and batches, over {SEEDS} seeds.",
        tables=[
            Table(columns, rows, "Nats per byte; positive is worse with the clip.")
        ],
        verdict=verdict(d.high < HARM for d in differences.values()),
        figure="no_harm.png",
        remarks=f"It counts as no harm if the interval ends below {HARM:g} nats.",
    )


def results(
    lab: Lab, plan: Plan, corpus: str, threshold: float = math.inf
) -> list[Result]:
    best = tuned_pair(lab, plan, corpus).muon
    return lab.results(plan.over_seeds(best.but(threshold=threshold), SEEDS))


def difference(lab: Lab, plan: Plan, corpus: str, threshold: float) -> Interval:
    clipped, free = (
        [final_loss(r, "report") for r in results(lab, plan, corpus, at)]
        for at in (threshold, math.inf)
    )
    return paired(clipped, free)


def row(lab: Lab, plan: Plan, corpus: str, threshold: float, by: Interval) -> list[str]:
    clipped = results(lab, plan, corpus, threshold)
    return [
        corpus,
        f"{threshold:g}",
        f"{mean(results(lab, plan, corpus), 'peak'):.1f}",
        f"{mean(clipped, 'fired'):,.0f}",
        f"{by.mean:+.4f}",
        f"{by.low:+.4f} to {by.high:+.4f}",
    ]


def mean(results: list[Result], name: str) -> float:
    return sum(result[name] for result in results) / len(results)


def draw(plan: Plan, differences) -> None:
    settings = dict(xlabel="threshold", ylabel="loss difference, nats per byte")
    with panels(plan.figures / "no_harm.png", plan.corpora, **settings) as axes:
        for corpus, one in zip(plan.corpora, axes, strict=True):
            points = [differences[corpus, threshold] for threshold in THRESHOLDS]
            x, half = range(len(THRESHOLDS)), [p.half for p in points]
            one.errorbar(x, [p.mean for p in points], half, fmt="o", color=CYCLE[1])
            one.axhline(0, color="black", linewidth=0.8)
            one.axhline(HARM, color="black", linewidth=0.8, linestyle=":")
            one.set_xticks(x, [f"{threshold:g}" for threshold in THRESHOLDS])

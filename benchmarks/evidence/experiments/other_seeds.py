"""Whether an experiment, run again with other seeds, comes out as it was reported."""

import dataclasses
import math
from typing import Any

from pictures import panels

from ..intervals import Interval, interval
from ..lab import Lab, losses
from ..plan import Plan
from ..section import Section, Table, verdict
from ..style import CYCLE
from . import no_harm


APART = 100  # from the first seeds to the others
OUTSIDE = 0.1  # of the figures may lie there; by chance a twentieth does

Figures = dict[tuple[str, str], Interval]  # by corpus and what it is the mean of


def experiment(lab: Lab, plan: Plan) -> Section:
    others = dataclasses.replace(plan, first_seed=plan.first_seed + APART)
    first, again = figures(lab, plan), figures(lab, others)
    draw(plan, first, again)
    inside = [repeats(first[key], again[key]) for key in first]
    columns = ["corpus", "", "reported", "with other seeds", "inside"]
    rows = [
        [
            *key,
            first[key].show("+.4f"),
            again[key].show("+.4f"),
            "yes" if repeats(first[key], again[key]) else "no",
        ]
        for key in first
    ]
    count = len(plan.seeds(no_harm.SEEDS))
    return Section(
        title="Other seeds",
        claim="This report: its intervals are as wide as its figures vary.",
        setting=f"No harm, all {2 * count} seeds of it trained alike: the {count} that "
        f"are reported, and {count} others from seed {others.first_seed} on.",
        tables=[Table(columns, rows, "Loss, or loss difference, in nats per byte.")],
        verdict=verdict([inside.count(False) <= OUTSIDE * len(inside)]),
        figure="other_seeds.png",
        remarks="A figure is inside if it differs from the reported one by at most "
        "the root of 2 times the reported half width, the 95 % interval for the mean "
        "of as many new runs. It counts as reproduced if at most a tenth of the "
        f"figures is outside: {inside.count(False)} of {len(inside)} were.",
    )


def figures(lab: Lab, plan: Plan) -> Figures:
    """What the experiment reports."""
    arms = no_harm.trained(lab, plan)
    of_corpus = {
        (corpus, "no clip: loss"): interval(losses(arms[corpus, math.inf]))
        for corpus in plan.corpora
    }
    differences = {
        (corpus, f"threshold {threshold:g}: difference"): difference
        for (corpus, threshold), difference in no_harm.compared(arms).items()
    }
    return of_corpus | differences


def repeats(reported: Interval, again: Interval) -> bool:
    return abs(again.mean - reported.mean) <= math.sqrt(2) * reported.half


def draw(plan: Plan, first: Figures, again: Figures) -> None:
    settings: dict[str, Any] = dict(xlabel="from the reported mean, in its half widths")
    with panels(plan.figures / "other_seeds.png", plan.corpora, **settings) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=True):
            keys = [key for key in first if key[0] == corpus]
            y = [-i for i in range(len(keys))]
            halves = [first[key].half for key in keys]
            offsets = [
                (again[key].mean - first[key].mean) / first[key].half for key in keys
            ]
            widths = [again[k].half / h for k, h in zip(keys, halves, strict=True)]
            one.errorbar(offsets, y, xerr=widths, fmt="o", color=CYCLE[1])
            one.axvspan(-math.sqrt(2), math.sqrt(2), color="black", alpha=0.1)
            one.set_yticks(y, [name for _, name in keys])

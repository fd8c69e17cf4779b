"""Whether an experiment, run again with other seeds, comes out as it was reported."""

import dataclasses
import math
from typing import Any

from pictures import panels
from scipy import stats
from tables import Table

from ..intervals import Interval, interval
from ..lab import Lab, losses
from ..plan import Plan
from ..section import Section
from ..style import CYCLE, rows
from . import no_harm


APART = 100  # from the first seeds to the others

LOSS = "no clip: loss"

Figures = dict[tuple[str, str], Interval]  # by corpus and what it is the mean of


def experiment(lab: Lab, plan: Plan) -> Section:
    others = dataclasses.replace(plan, first_seed=plan.first_seed + APART)
    first, again = figures(lab, plan), figures(lab, others)
    draw(plan, first, again)
    inside = [repeats(first[key], again[key]) for key in first]
    outside, allowed = inside.count(False), by_chance(len(inside))
    columns = ["corpus", "", "reported", "with other seeds", "inside"]
    entries = [
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
        claim="This report: its intervals are as wide as its figures vary, here those "
        "of one experiment.",
        setting=f"No harm, all {2 * count} seeds of it trained alike: the {count} that "
        f"are reported, and {count} others from seed {others.first_seed} on.",
        tables=[Table(columns, entries, "Loss, or loss difference, in nats per byte.")],
        parts={"figures of other seeds inside the intervals": [outside <= allowed]},
        figure="other_seeds.png",
        remarks="A figure is inside if it differs from the reported one by at most "
        "the root of 2 times the reported half width, the 95 % interval for the mean "
        f"of as many new runs. It counts as reproduced if at most {allowed} of "
        f"{len(inside)} are outside, as many as chance puts there in 95 of 100 cases: "
        f"it was {outside}.",
    )


def figures(lab: Lab, plan: Plan) -> Figures:
    """What the experiment reports."""
    arms = no_harm.trained(lab, plan)
    of_corpus = {
        (corpus, LOSS): interval(losses(arms[corpus, math.inf]))
        for corpus in plan.corpora
    }
    differences = {
        (corpus, f"threshold {threshold:g}: difference"): difference
        for (corpus, threshold), difference in no_harm.compared(arms).items()
    }
    return of_corpus | differences


def by_chance(count: int) -> int:
    """How many of so many 95 % intervals miss, at most, in 95 of 100 cases."""
    return int(stats.binom.ppf(0.95, count, 0.05))


def repeats(reported: Interval, again: Interval) -> bool:
    return abs(again.mean - reported.mean) <= math.sqrt(2) * reported.half


def draw(plan: Plan, first: Figures, again: Figures) -> None:
    titles = [f"{c}: {what}" for c in plan.corpora for what in ("loss", "differences")]
    settings: dict[str, Any] = dict(xlabel="nats per byte")
    file, count = plan.figures / "other_seeds.png", len(plan.corpora)
    with panels(file, titles, rows=count, **settings) as axes:
        for i, corpus in enumerate(plan.corpora):
            for j, (label, of) in enumerate([("reported", first), ("again", again)]):
                mine = {name: of[c, name] for c, name in of if c == corpus}
                loss = {name: mine.pop(name) for name in list(mine) if name == LOSS}
                style: dict[str, Any] = dict(color=CYCLE[j], label=label)
                for one, means in zip(axes[2 * i :], (loss, mine), strict=False):
                    rows(one, {}, means, shift=0.1 - 0.2 * j, **style)

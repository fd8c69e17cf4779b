"""Loss spikes at one, two and four times the best constant rate."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from pictures import panels
from tables import Table

from ..intervals import Interval, interval, paired
from ..lab import Lab, losses
from ..plan import Plan
from ..recipe import HEADS
from ..run import Run
from ..section import Section
from ..spikes import ABOVE, stress_spikes, stress_steps, WINDOW
from ..style import CYCLE
from ..tuning import tuned
from .defaults import RISING


STEPS, SEEDS, FACTORS = 1000, 10, (1, 2, 4)
COUNTED = 10_000  # the steps that a count is given for, as Qwen does
# Two thirds of what logits come to by themselves at the best rate.
THRESHOLD = 10.0
SHAPE: dict[str, Any] = dict(
    layers=2, width=32, heads=2, steps=STEPS, schedule="constant", weight_decay=0.1
)
MUON = RISING | HEADS
ARMS: dict[str, dict[str, Any]] = {
    "AdamW": dict(optimizer="adamw", beta=0.9),
    "Muon": MUON,
    "MuonClip": MUON | dict(threshold=THRESHOLD),
    "Muon, 8 steps": MUON
    | dict(muon=(("ns_coeffs", "polar_express_8"), ("ns_steps", 8))),
    "Muon, 10 steps": MUON
    | dict(muon=(("ns_coeffs", "deepseek_v4"), ("ns_steps", 10))),
}
CLIP = "the clip: fewer spikes than without"
# Who is to have fewer spikes than whom, at which multiples of the best rate.
CLAIMS = {
    "Muon: fewer spikes than AdamW": ("Muon", "AdamW", (2, 4)),
    CLIP: ("MuonClip", "Muon", FACTORS),
    "8 steps of Newton-Schulz: fewer spikes than 5": ("Muon, 8 steps", "Muon", FACTORS),
    "10 steps: fewer spikes than 5": ("Muon, 10 steps", "Muon", FACTORS),
}


class Arm(NamedTuple):
    """One optimizer at one multiple of its best rate, seed by seed."""

    spikes: list[float]  # in `COUNTED` steps
    losses: list[float]  # after all steps
    peaks: list[float]  # the largest attention logit


Found = Mapping[tuple[str, int], Arm]  # by name and multiple


def experiment(lab: Lab, plan: Plan) -> Section:
    best, found = best_rates(lab, plan), measured(lab, plan)
    draw(plan, found)
    rates = " and ".join(f"{rate:g} for {name}" for name, rate in best.items())
    return Section(
        title="Stress",
        claim="Qwen3.8-Flash-Next: at twice the best rate AdamW spikes 4.3 times in "
        "10,000 steps and Muon 0.2 times; 8 steps of Newton-Schulz make spikes fewer "
        "and smaller. Kimi K2 (arXiv:2507.20534): with QK-Clip no loss spike.",
        setting=f"2 layers of width 32, {STEPS} steps of 1,024 bytes "
        f"({plan.corpora[0]}) at a constant rate, weight decay 0.1. The best rates are "
        f"{rates}, tuned with another seed. Muon is the package's default, MuonClip "
        f"clips at {THRESHOLD:g}, which logits pass by themselves. A spike is a step "
        f"whose training loss is more than {ABOVE:g} above the median of the {WINDOW} "
        "steps around it; what a batch moves in the median of all runs that saw it is "
        f"the batch's own and taken off. {SEEDS} seeds.",
        tables=[table(found), claim_table(found)],
        parts={
            claim: [difference(found, claim, factor).high < 0 for factor in factors]
            for claim, (_, _, factors) in CLAIMS.items()
        },
        figure="stress.png",
        remarks="A part counts as reproduced if the interval of the difference is "
        "below zero at each of the multiples that it speaks of. One text, one small "
        f"model. {seen(found)}",
    )


def best_rates(lab: Lab, plan: Plan) -> dict[str, float]:
    return {name: best_rate(lab, plan, name) for name in ("AdamW", "Muon")}


def measured(lab: Lab, plan: Plan) -> Found:
    return measure(lab, runs(plan, best_rates(lab, plan)))


def best_rate(lab: Lab, plan: Plan, name: str) -> float:
    """The best constant rate; Muon's is that of both its sides."""
    settings = SHAPE | dict(learning_rate=8e-3) | ARMS[name]
    start = plan.run(plan.corpora[0], **settings)
    start = start.but(adam_learning_rate=start.learning_rate)
    one_rate = start.optimizer == "muon"
    return tuned(lab, start, ("learning_rate",), one_rate=one_rate).learning_rate


def runs(plan: Plan, best: Mapping[str, float]) -> dict[Any, list[Run]]:
    found = {}
    for name, changes in ARMS.items():
        for factor in FACTORS:
            rate = factor * best.get(name, best["Muon"])
            settings = dict(learning_rate=rate, adam_learning_rate=rate)
            run = plan.run(plan.corpora[0], **SHAPE | changes | settings)
            run = run.but(probe="losses", evaluations=5)
            found[name, factor] = plan.over_seeds(run, SEEDS)
    return found


def measure(lab: Lab, runs: dict[Any, list[Run]]) -> Found:
    results = lab.gather(runs)
    of_seeds = zip(*results.values(), strict=True)
    counts = np.array([stress_spikes([r["losses"] for r in rs]) for rs in of_seeds])
    share = COUNTED / max(1, stress_steps(next(iter(runs.values()))[0].steps))
    return {
        key: Arm(
            (share * counts[:, i]).tolist(),
            losses(of_arm),
            [result["peak"] for result in of_arm],
        )
        for i, (key, of_arm) in enumerate(results.items())
    }


def difference(found: Found, claim: str, factor: int) -> Interval:
    """Spikes of one optimizer over those of another, with the same seeds."""
    fewer, more, _ = CLAIMS[claim]
    return paired(found[fewer, factor].spikes, found[more, factor].spikes)


def seen(found: Found) -> str:
    """What ten seeds can tell apart, for a remark."""
    halves = [difference(found, c, f).half for c in CLAIMS for f in FACTORS]
    means = [np.mean(arm.spikes) for arm in found.values()]
    return (
        f"A difference of {np.mean(halves):.0f} spikes could be seen, on average, "
        f"where there are {np.mean(means):.0f}."
    )


def table(found: Found) -> Table:
    columns = ["", "rate over the best", f"spikes in {COUNTED:,} steps"]
    columns += ["final loss", "largest logit"]
    rows = [
        [
            name,
            f"{factor}",
            interval(arm.spikes).show(".1f"),
            interval(arm.losses).show(),
            interval(arm.peaks).show(".0f"),
        ]
        for (name, factor), arm in found.items()
    ]
    return Table(columns, rows)


def claim_table(found: Found) -> Table:
    columns = ["", *(f"at {factor} times the best rate" for factor in FACTORS)]
    rows = [
        [claim, *(difference(found, claim, f).span("+.1f") for f in FACTORS)]
        for claim in CLAIMS
    ]
    caption = f"Difference in spikes in {COUNTED:,} steps, 95 % interval."
    return Table(columns, rows, caption)


def draw(plan: Plan, found: Found) -> None:
    titles = [f"loss spikes in {COUNTED:,} steps", "final loss, nats per byte"]
    with panels(plan.figures / "stress.png", titles) as (counts, ends):
        draw_by_rate(counts, found, "spikes")
        draw_by_rate(ends, found, "losses")


def draw_by_rate(axes: Axes, found: Found, what: str) -> None:
    """Means and intervals of one field of every arm."""
    for i, (name, color) in enumerate(zip(ARMS, CYCLE, strict=False)):
        of = [interval(getattr(found[name, factor], what)) for factor in FACTORS]
        # Side by side, so that intervals do not cover one another.
        x = [j + 0.12 * (i - len(ARMS) // 2) for j in range(len(FACTORS))]
        means, halves = [one.mean for one in of], [one.half for one in of]
        axes.errorbar(x, means, yerr=halves, fmt="o", color=color, label=name)
    axes.set_xticks(range(len(FACTORS)), [f"{factor} x" for factor in FACTORS])
    axes.set(xlabel="constant rate over the best")

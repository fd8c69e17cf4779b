"""Which heads and which of their projections the clip should scale."""

from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..intervals import Interval, interval, paired
from ..lab import Lab, losses, Result
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import CYCLE, rows
from .explosion import percentiles, RATE, Trained, UNHELD


STEPS, THRESHOLD, SEEDS = 400, 15.0, 5
GROUPED: dict[str, Any] = dict(key_heads=1)
ARMS: dict[str, dict[str, Any]] = {
    "no clip": {},
    "per head": dict(threshold=THRESHOLD),
    "per layer": dict(threshold=THRESHOLD, sharing="layer"),
    "shared key: no clip": GROUPED,
    "shared key: queries alone": GROUPED | dict(threshold=THRESHOLD),
    "shared key: balanced": GROUPED | dict(threshold=THRESHOLD, sharing="balanced"),
}
HEADS, MANY = ("per head",), 0.5
PAIRS = {"per head": "per layer", "shared key: queries alone": "shared key: balanced"}


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = lab.gather(runs(plan))
    differences = {
        (corpus, ours): paired(losses(arms[corpus, ours]), losses(arms[corpus, theirs]))
        for corpus in plan.corpora
        for ours, theirs in PAIRS.items()
    }
    draw(plan, arms)
    by_layer = [arms[corpus, "per layer"] for corpus in plan.corpora]
    return Section(
        title="Per head or per layer, queries alone or balanced",
        claim="Su (kexue.fm/archives/11126): only a few heads of a layer explode, and "
        "clipping the layer by its largest head clips the others for nothing. For keys "
        "that several queries share the paper gives no rule; the package scales the "
        "queries alone.",
        setting=f"3 layers of width 64, 4 heads, {STEPS} steps at a constant rate of "
        f"{RATE:g} without weight decay, threshold {THRESHOLD:g}; {SEEDS} seeds. With "
        "a shared key, one key serves all four queries; balanced, the key takes the "
        "root of the least gamma of its queries.",
        tables=[arms_table(arms), pairs_table(differences)],
        parts={
            "a clip per layer scales heads for nothing": [
                for_nothing(results) > MANY for results in by_layer
            ],
            "a clip per head ends with a lower loss": [
                d.high < 0 for (_, ours), d in differences.items() if ours in HEADS
            ],
        },
        figure="sharing.png",
        remarks="It counts as reproduced if, on every corpus, clipping per layer "
        f"scales mostly heads that are not over the threshold ({scaled_said(by_layer)} "
        "of those it scaled were not) and clipping per head ends with a lower loss "
        "beyond the interval. " + sharing_remark(differences),
    )


def arms_table(arms: Trained) -> Table:
    columns = ["corpus", "", "loss", "95th percentile of the largest logit"]
    columns += [f"heads over {THRESHOLD:g}, a step", "heads scaled, a step"]
    return Table(columns, [row(*key, results) for key, results in arms.items()])


def pairs_table(differences: dict[tuple[str, str], Interval]) -> Table:
    entries = [
        [corpus, f"{ours}, against {PAIRS[ours]}", f"{d.mean:+.4f}", d.span()]
        for (corpus, ours), d in differences.items()
    ]
    columns = ["corpus", "", "loss difference", "95 % interval"]
    return Table(columns, entries, "Paired by seed; negative is better for the first.")


def for_nothing(results: list[Result]) -> float:
    """The share of the heads scaled that were not over the threshold."""
    fired, scaled = (sum(r[name] for r in results) for name in ("fired", "scaled"))
    return 1 - fired / scaled if scaled else 0.0


def scaled_said(by_layer: list[list[Result]]) -> str:
    return " and ".join(f"{for_nothing(results):.0%}" for results in by_layer)


def sharing_remark(differences: dict[tuple[str, str], Interval]) -> str:
    signs = {np.sign(d.mean) * (d.low * d.high > 0) for d in of_shared(differences)}
    if signs == {-1.0}:
        return "With a shared key, queries alone is better than balanced."
    if signs == {1.0}:
        return "With a shared key, balanced is better than queries alone."
    return "Between the two rules for shared keys no consistent difference is seen."


def of_shared(differences: dict[tuple[str, str], Interval]) -> list[Interval]:
    return [d for (_, ours), d in differences.items() if ours not in HEADS]


def runs(plan: Plan) -> dict[tuple[str, str], list[Run]]:
    return plan.arms(ARMS, SEEDS, steps=STEPS, **UNHELD)


def row(corpus: str, arm: str, results: list[Result]) -> list[str]:
    steps = sum(len(result["losses"]) for result in results)
    over, scaled = (
        sum(r[name] for r in results) / steps for name in ("fired", "scaled")
    )
    clips = "threshold" in ARMS[arm]
    return [
        corpus,
        arm,
        interval(losses(results)).show(),
        f"{np.mean(percentiles(results)):.1f}",
        f"{over:.2f}" if clips else "-",
        f"{scaled:.2f}" if clips else "-",
    ]


def draw(plan: Plan, arms: Trained) -> None:
    file, label = plan.figures / "sharing.png", "loss, nats per byte"
    with panels(file, plan.corpora, xlabel=label) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=True):
            values = {arm: losses(arms[corpus, arm]) for arm in ARMS}
            means = {arm: interval(of_arm) for arm, of_arm in values.items()}
            rows(one, values, means, color=CYCLE[1])

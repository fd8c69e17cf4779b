"""Which heads and which of their projections the clip should scale."""

from typing import Any

from pictures import panels

from ..intervals import Interval, interval, paired
from ..lab import Lab, losses, Result
from ..plan import Plan
from ..run import Run
from ..section import Section, Table, verdict
from ..style import CYCLE
from .explosion import mean, percentiles


STEPS, RATE, THRESHOLD, SEEDS = 400, 3.2e-2, 15.0, 5
GROUPED: dict[str, Any] = dict(key_heads=1)
ARMS: dict[str, dict[str, Any]] = {
    "no clip": {},
    "per head": dict(threshold=THRESHOLD),
    "per layer": dict(threshold=THRESHOLD, sharing="layer"),
    "shared key: no clip": GROUPED,
    "shared key: queries alone": GROUPED | dict(threshold=THRESHOLD),
    "shared key: balanced": GROUPED | dict(threshold=THRESHOLD, sharing="balanced"),
}
PAIRS = {"per head": "per layer", "shared key: queries alone": "shared key: balanced"}


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = lab.gather(runs(plan))
    differences = {
        (corpus, ours): paired(losses(arms[corpus, ours]), losses(arms[corpus, theirs]))
        for corpus in plan.corpora
        for ours, theirs in PAIRS.items()
    }
    draw(plan, arms)
    columns = ["corpus", "", "loss", "95th percentile of the largest logit"]
    columns += ["heads over it, a step", "heads scaled, a step"]
    rows = [row(*key, results) for key, results in arms.items()]
    pair_rows = [
        [
            corpus,
            f"{ours}, against {PAIRS[ours]}",
            f"{d.mean:+.4f}",
            f"{d.low:+.4f} to {d.high:+.4f}",
        ]
        for (corpus, ours), d in differences.items()
    ]
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
        tables=[
            Table(columns, rows),
            Table(
                ["corpus", "", "loss difference", "95 % interval"],
                pair_rows,
                "Paired by seed; negative is better for the first.",
            ),
        ],
        verdict=verdict(
            d.high < 0 for (_, ours), d in differences.items() if ours == "per head"
        ),
        figure="sharing.png",
        remarks="It counts as reproduced if clipping per head is better than per layer "
        "beyond the interval on every corpus. " + sharing_remark(differences),
    )


def sharing_remark(differences: dict[tuple[str, str], Interval]) -> str:
    shared = [d for (_, ours), d in differences.items() if "shared" in ours]
    if all(d.low <= 0 <= d.high for d in shared):
        return "Between the two rules for shared keys no difference is seen."
    return "The two rules for shared keys differ: see the table."


def runs(plan: Plan) -> dict[tuple[str, str], list[Run]]:
    return plan.arms(
        ARMS,
        SEEDS,
        steps=STEPS,
        schedule="constant",
        learning_rate=RATE,
        adam_learning_rate=8e-3,
        weight_decay=0.0,
        probe="steps",
    )


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
        f"{mean(percentiles(results)):.1f}",
        f"{over:.2f}" if clips else "-",
        f"{scaled:.2f}" if clips else "-",
    ]


def draw(plan: Plan, arms) -> None:
    with panels(
        plan.figures / "sharing.png", plan.corpora, xlabel="loss, nats per byte"
    ) as axes:
        for (corpus, arm), results in arms.items():
            one, y = axes[list(plan.corpora).index(corpus)], -list(ARMS).index(arm)
            color = CYCLE[3 if "shared" in arm else 1]
            one.plot(losses(results), [y] * len(results), ".", color=color, alpha=0.4)
            middle = interval(losses(results))
            one.errorbar(middle.mean, y, xerr=middle.half, fmt="o", color=color)
            one.set_yticks([-i for i in range(len(ARMS))], list(ARMS))

"""Logits that grow without bound, and what keeps them from it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from pictures import panels
from tables import Table

from ..intervals import interval
from ..lab import Lab, losses, Result
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..spikes import spikes
from ..style import band, CYCLE


Arms = Mapping[str, Mapping[str, Any]]  # settings by arm
Trained = Mapping[tuple[str, str], list[Result]]  # by corpus and arm

STEPS, RATE, SEEDS = 1200, 3.2e-2, 3
# Nothing but the clip holds the logits.
UNHELD: dict[str, Any] = dict(
    schedule="constant",
    learning_rate=RATE,
    adam_learning_rate=8e-3,
    weight_decay=0.0,
    probe="steps",
)
ARMS: Arms = {
    "no clip": {},
    "threshold 100": dict(threshold=100.0),
    "threshold 30": dict(threshold=30.0),
    "QK-norm": dict(normalized=True),
    "weight decay 0.1": dict(weight_decay=0.1),
}


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = lab.gather(runs(plan))
    draw(plan, "explosion.png", arms)
    return Section(
        title="Explosion and control",
        claim="Kimi K2 (arXiv:2507.20534, figure 2): with Muon the largest attention "
        "logit grows past 1,000; QK-Clip holds it at its threshold, and 15.5 T tokens "
        "pass without a loss spike. Su: weight decay alone does so in small models.",
        setting=f"3 layers of width 64, 4 heads, {STEPS} steps at a constant rate of "
        f"{RATE:g}, high for this size, without weight decay unless an arm says so; "
        f"{SEEDS} seeds. The percentile is over all steps. A spike is a step whose "
        "training loss is 6 scaled median deviations above the median of the 50 "
        "before it.",
        tables=[table(arms, ARMS)],
        parts={
            "logits pass 1,000 without the clip": explodes(arms, ARMS),
            "the clip holds them": held(arms, ARMS),
            "weight decay alone keeps them below 1,000": [
                not grown(of) for (_, arm), of in arms.items() if "decay" in arm
            ],
            "no loss spike with the clip": [
                count == 0 for arm, count in spikes_by_arm(arms) if clips(arm)
            ],
        },
        figure="explosion.png",
        remarks="It counts as reproduced if, on every corpus, the largest logit passes "
        "1,000 without the clip and not with weight decay, its 95th percentile stays "
        "within 1.2 thresholds with the clip, and no loss spike is seen then. "
        + about_spikes(arms),
    )


def runs(plan: Plan) -> dict[tuple[str, str], list[Run]]:
    return plan.arms(ARMS, SEEDS, steps=STEPS, **UNHELD)


def explodes(arms: Trained, settings: Arms) -> list[bool]:
    """Whether the largest logit passes 1,000 where nothing holds it."""
    return [grown(of) for (_, arm), of in arms.items() if not settings[arm]]


def grown(results: list[Result]) -> bool:
    return bool(np.mean(peaks(results)) > 1000)


def held(arms: Trained, settings: Arms) -> list[bool]:
    """Whether 95 % of the steps stay within 1.2 thresholds where there is one."""
    return [
        bool(np.mean(percentiles(of)) <= 1.2 * settings[arm]["threshold"])
        for (_, arm), of in arms.items()
        if "threshold" in settings[arm]
    ]


def about_spikes(arms: Trained) -> str:
    counts = spikes_by_arm(arms)
    free = np.mean([count for arm, count in counts if arm == "no clip"])
    clipped = np.mean([count for arm, count in counts if clips(arm)])
    return f"Loss spikes a run: {free:.1f} without the clip, {clipped:.1f} with it."


def spikes_by_arm(arms: Trained) -> list[tuple[str, float]]:
    """A run's mean count, by arm and corpus."""
    return [(arm, spike_count(results)) for (_, arm), results in arms.items()]


def spike_count(results: list[Result]) -> float:
    return float(np.mean([len(spikes(result["losses"])) for result in results]))


def clips(arm: str) -> bool:
    return "threshold" in ARMS[arm]


def peaks(results: list[Result]) -> list[float]:
    return [result["peak"] for result in results]


def percentiles(results: list[Result]) -> list[float]:
    return [float(np.percentile(result["logits"], 95)) for result in results]


def table(arms: Trained, settings: Arms) -> Table:
    columns = ["corpus", "", "largest logit", "its 95th percentile", "in thresholds"]
    columns += ["final loss", "spikes a run", "head-clips a run"]
    rows = [
        row(corpus, arm, settings[arm].get("threshold"), results)
        for (corpus, arm), results in arms.items()
    ]
    return Table(columns, rows)


def row(
    corpus: str, arm: str, threshold: float | None, results: list[Result]
) -> list[str]:
    typical = np.mean(percentiles(results))
    return [
        corpus,
        arm,
        interval(peaks(results)).show(",.0f"),
        f"{typical:,.0f}",
        f"{typical / threshold:.2f}" if threshold else "-",
        interval(losses(results)).show(),
        f"{spike_count(results):.1f}",
        f"{np.mean([r['fired'] for r in results]):,.0f}" if threshold else "-",
    ]


def draw(plan: Plan, file: str, arms: Trained) -> None:
    titles = [
        f"{c}: {what}" for c in plan.corpora for what in ("largest logit", "loss")
    ]
    order = list(dict.fromkeys(arm for _, arm in arms))
    with panels(plan.figures / file, titles, rows=len(plan.corpora)) as axes:
        for (corpus, arm), results in arms.items():
            i = 2 * list(plan.corpora).index(corpus)
            style = dict(color=CYCLE[order.index(arm)], label=arm)
            for one, name in zip(axes[i : i + 2], ("logits", "losses"), strict=True):
                draw_course(one, results, name, **style)
            axes[i].set(xlabel="step", ylabel="largest logit", yscale="log")
            axes[i + 1].set(xlabel="step", ylabel="training loss, nats per byte")
            leave_out_the_beginning(axes[i + 1])


def draw_course(
    axes: Axes, results: list[Result], name: str, *, color: str, label: str
) -> None:
    """One field of every step, smoothed, over the seeds."""
    curves = np.array([smooth(result[name]) for result in results])
    x = WINDOW * (0.5 + np.arange(curves.shape[1]))
    band(axes, x, curves, color=color, label=label)


def leave_out_the_beginning(axes: Axes) -> None:
    """Where the loss falls so steeply that nothing else would be seen."""
    curves = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    low, high = min(np.nanmin(c) for c in curves), max(c[len(c) // 25] for c in curves)
    axes.set_ylim(low - 0.1 * (high - low), high)


WINDOW = 10  # steps that the figures average


def smooth(values: list[float]) -> np.ndarray:
    kept = len(values) // WINDOW * WINDOW
    return np.mean(np.reshape(values[:kept], (-1, WINDOW)), axis=1)

"""QK-Clip behind AdamW."""

from ..intervals import paired
from ..lab import Lab, losses
from ..plan import Plan
from ..run import Run
from ..section import Section, verdict
from .explosion import draw, mean, peaks, percentiles, table


STEPS, RATE, SEEDS = 1200, 1.6e-2, 3
ARMS = {
    "no clip": {},
    "threshold 100": dict(threshold=100.0),
    "threshold 30": dict(threshold=30.0),
}


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = lab.gather(
        {
            (corpus, arm): runs(plan, corpus, arm)
            for corpus in plan.corpora
            for arm in ARMS
        }
    )
    draw(plan, "adam_clip.png", arms)
    gains = {
        (c, arm): paired(losses(arms[c, arm]), losses(arms[c, "no clip"])).mean
        for c, arm in arms
        if arm != "no clip"
    }
    held = [
        mean(percentiles(results)) <= 1.2 * ARMS[arm]["threshold"]
        for (_, arm), results in arms.items()
        if "threshold" in ARMS[arm]
    ]
    free = [mean(peaks(arms[corpus, "no clip"])) > 1000 for corpus in plan.corpora]
    return Section(
        title="AdamClip",
        claim="Su (kexue.fm/archives/11126): logits explode under Adam too, and "
        "QK-Clip works behind any optimizer.",
        setting=f"AdamW with `mc.clip_qk` behind it: 3 layers of width 64, {STEPS} "
        f"steps at a constant rate of {RATE:g}, without weight decay; {SEEDS} seeds.",
        tables=[table(arms, ARMS)],
        verdict=verdict([*free, *held, *(gain <= 0 for gain in gains.values())]),
        figure="adam_clip.png",
        remarks="It counts as reproduced if, on every corpus, the largest logit passes "
        "1,000 without the clip, its 95th percentile stays within 1.2 thresholds with "
        "it, and the loss is no worse for it.",
    )


def runs(plan: Plan, corpus: str, arm: str) -> list[Run]:
    run = plan.run(
        corpus,
        optimizer="adamw",
        steps=STEPS,
        schedule="constant",
        learning_rate=RATE,
        weight_decay=0.0,
        probe="steps",
        **ARMS[arm],
    )
    return list(plan.over_seeds(run, SEEDS))

"""QK-Clip after AdamW."""

from ..intervals import paired
from ..lab import Lab, losses
from ..plan import Plan
from ..run import Run
from ..section import Section
from .explosion import Arms, draw, explodes, held, table
from .no_harm import HARM


STEPS, RATE, SEEDS = 1200, 1.6e-2, 3
ARMS: Arms = {
    "no clip": {},
    "threshold 100": dict(threshold=100.0),
    "threshold 30": dict(threshold=30.0),
}


def experiment(lab: Lab, plan: Plan) -> Section:
    arms = lab.gather(runs(plan))
    draw(plan, "adam_clip.png", arms)
    costs = [
        paired(losses(arms[corpus, arm]), losses(arms[corpus, "no clip"]))
        for corpus, arm in arms
        if arm != "no clip"
    ]
    return Section(
        title="AdamClip",
        claim="Su (kexue.fm/archives/11126): logits explode under Adam too, and "
        "QK-Clip works after any optimizer.",
        setting=f"AdamW with `mc.clip_qk` after it: 3 layers of width 64, {STEPS} "
        f"steps at a constant rate of {RATE:g}, without weight decay; {SEEDS} seeds.",
        tables=[table(arms, ARMS)],
        parts={
            "logits pass 1,000 without the clip": explodes(arms, ARMS),
            "the clip holds them": held(arms, ARMS),
            "at no cost in loss": [cost.high < HARM for cost in costs],
        },
        figure="adam_clip.png",
        remarks="It counts as reproduced if, on every corpus, the largest logit passes "
        "1,000 without the clip, its 95th percentile stays within 1.2 thresholds with "
        "it, and the interval of what the clip adds to the loss ends below "
        f"{HARM:g} nats.",
    )


def runs(plan: Plan) -> dict[tuple[str, str], list[Run]]:
    return plan.arms(
        ARMS,
        SEEDS,
        optimizer="adamw",
        steps=STEPS,
        schedule="constant",
        learning_rate=RATE,
        weight_decay=0.0,
        probe="steps",
    )

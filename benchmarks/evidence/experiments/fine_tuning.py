"""Which optimizer fine-tunes what which one trained: all weights, or adapters."""

from collections.abc import Mapping, Sequence
from typing import Any

from pictures import panels
from tables import Table

from ..arms import train, Trained
from ..intervals import Interval, interval
from ..lab import Lab
from ..plan import Plan
from ..recipe import HEADS
from ..run import Run
from ..section import Section
from ..style import around_zero, CYCLE, rows
from ..texts import CHECK
from ..tuning import AXES, tuned
from .defaults import RISING


SEEDS, RANK = 5, 4
MODEL = dict(layers=3, width=64, heads=4)
BEFORE, AFTER = 2000, 400  # steps
NEW = next(iter(CHECK))  # the text to fine-tune on
ADAMW, MUON = "AdamW", "MuonClip"
DEFAULT: dict[str, Any] = RISING | HEADS  # as `mc.muonclip(learning_rate)`
# Where the walks begin.
TRAINED: dict[str, dict[str, Any]] = {
    ADAMW: dict(optimizer="adamw", learning_rate=8e-3, weight_decay=0.3, beta=0.7),
    MUON: DEFAULT | dict(learning_rate=1.6e-2, adam_learning_rate=1.6e-2),
}
TUNED: dict[str, dict[str, Any]] = {
    ADAMW: dict(optimizer="adamw", learning_rate=2e-3),
    MUON: DEFAULT | dict(learning_rate=4e-3, adam_learning_rate=4e-3),
}
LORA = dict(rank=RANK, weight_decay=0.0, beta=0.9)
ADAPTED: dict[str, dict[str, Any]] = {
    "LoRA by AdamW": LORA | dict(optimizer="adamw", learning_rate=8e-3),
    "LoRA by Muon": LORA | dict(learning_rate=1.6e-2, adam_learning_rate=1.6e-2),
    "LoRA, Muon on B alone": LORA
    | dict(matrices="lora_b", learning_rate=1.6e-2, adam_learning_rate=1.6e-2),
}
# Each against the same by AdamW.
BASES = {MUON: ADAMW} | dict.fromkeys(list(ADAPTED)[1:], next(iter(ADAPTED)))
Key = tuple[str, str]  # the text and the optimizer of the training before


def gained(m: Trained, arm: str) -> Interval:
    """The loss of an arm on the new text, over that of the same by AdamW."""
    return m.over(arm, BASES[arm])


def forgotten(m: Trained, arm: str) -> Interval:
    """The loss on the old text, over that before fine-tuning."""
    return interval([b - a for a, b in (r["forgotten"] for r in m.results[arm])])


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    draw(plan, found)
    after: dict[str, dict[str, Interval]] = {first: {} for first in TRAINED}
    for (corpus, first), m in found.items():
        after[first][corpus] = gained(m, MUON)
    rises = [forgotten(m, arm).mean for m in found.values() for arm in TUNED]
    return Section(
        title="Fine-tuning",
        claim="Moonlight (arXiv:2502.16982): fine-tuned by Muon, a model that Muon "
        "trained is better than with either of the two by AdamW; one that AdamW "
        "trained gains nothing by Muon.",
        setting=f"147,456 matrix parameters, trained for {BEFORE:,} steps of 1,024 "
        f"bytes and fine-tuned for {AFTER} on {NEW}, cosine schedules. For the "
        "training AdamW's rate, decay and b1 are tuned and the one rate of "
        "`mc.muonclip(learning_rate)`; for fine-tuning the one rate of every arm, anew "
        f"for every model. LoRA: rank {RANK} on all matrices, without decay, `a` drawn "
        f"and `b` zero. Forgetting is what the loss on the old text grows by. {SEEDS} "
        "seeds, of both trainings.",
        tables=[table(found, list(TUNED)), table(found, list(ADAPTED))],
        parts={
            "after MuonClip, MuonClip ends lower": [
                d.high < 0 for d in after[MUON].values()
            ],
            "after AdamW, MuonClip does not": [
                d.high >= 0 for d in after[ADAMW].values()
            ],
        },
        figure="fine_tuning.png",
        remarks="By the interval of the difference, paired by seed.",
        answer=f"The models were trained on {' and '.join(texts(plan))} and "
        f"fine-tuned on {NEW}, with tuned rates. MuonClip's loss less AdamW's is "
        f"{said(after[ADAMW])} nats where AdamW had trained the model, and "
        f"{said(after[MUON])} where MuonClip had. With adapters it is "
        f"{said(gains(found, list(ADAPTED)[1]))}, and with Muon on `b` alone "
        f"{said(gains(found, list(ADAPTED)[2]))}. The loss on the old text rises by "
        f"{min(rises):.1f} to {max(rises):.1f} nats, with adapters by less.",
        limits="Texts that share more than these: here fine-tuning is nearly training "
        "anew; instruction data, billions of parameters, rates that nobody tunes.",
    )


def gains(found: Mapping[Key, Trained], arm: str) -> dict[str, Interval]:
    """Of the models that each optimizer trained; of one text, see `texts`."""
    return {f"{first}'s model": gained(m, arm) for (_, first), m in found.items()}


def said(differences: Mapping[str, Interval]) -> str:
    """`-0.01 ± 0.02`, and of what where there are several."""
    several = len(differences) > 1
    return ", ".join(
        d.show("+.3f") + f" ({of})" * several for of, d in differences.items()
    )


def texts(plan: Plan) -> Sequence[str]:
    """To train on before: the first alone, since training is what takes long."""
    return plan.corpora[:1]


def measured(lab: Lab, plan: Plan) -> dict[Key, Trained]:
    best = {
        (corpus, first): walk(lab, plan, corpus, first)
        for corpus in texts(plan)
        for first in TRAINED
    }
    return train(lab, plan, best, SEEDS)


def walk(lab: Lab, plan: Plan, corpus: str, first: str) -> dict[str, Run]:
    """The best of every arm, after the best training before."""
    before = plan.run(corpus, **MODEL | TRAINED[first], steps=BEFORE)
    axes = (*AXES, "beta") if first == ADAMW else ("learning_rate",)
    before = tuned(lab, before, plan.axes(axes), one_rate=first == MUON)
    start = tuple(before.settings.items())
    return {
        arm: tuned(
            lab,
            plan.run(NEW, **MODEL | changes, steps=AFTER, start=start),
            ("learning_rate",),
            one_rate=changes.get("optimizer") != "adamw",
        )
        for arm, changes in (TUNED | ADAPTED).items()
    }


def table(found: Mapping[Key, Trained], arms: list[str]) -> Table:
    columns = ["trained on", "by", "fine-tuned", "loss", "over AdamW's"]
    columns += ["forgotten", "rate"]
    entries = [
        [
            *key,
            arm,
            interval(m.losses(arm)).show(),
            gained(m, arm).difference() if arm in BASES else "-",
            forgotten(m, arm).show("+.3f"),
            f"{m.best[arm].learning_rate:.2g}",
        ]
        for key, m in found.items()
        for arm in arms
    ]
    caption = f"Losses on {NEW} and what is forgotten of the old text, nats per byte."
    return Table(columns, entries, caption)


def draw(plan: Plan, found: Mapping[Key, Trained]) -> None:
    file, count = plan.figures / "fine_tuning.png", len(texts(plan))
    titles = [f"{c}, then {NEW}: loss over AdamW's" for c in texts(plan)]
    titles += [f"{c}, then {NEW}: forgotten" for c in texts(plan)]
    with panels(file, titles, rows=min(2, count), xlabel="nats per byte") as axes:
        for (corpus, first), m in found.items():
            place, i = list(texts(plan)).index(corpus), list(TRAINED).index(first)
            style: dict[str, Any] = dict(
                color=CYCLE[i], label=f"trained by {first}", shift=-0.25 * i
            )
            rows(axes[place], {arm: gained(m, arm) for arm in BASES}, **style)
            rows(axes[count + place], {x: forgotten(m, x) for x in m.best}, **style)
        for one in axes:
            around_zero(one)

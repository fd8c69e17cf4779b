"""What `mc.muonclip(learning_rate)` should do by itself, on a third text as well."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pictures import panels
from tables import Table

from ..arms import train, Trained
from ..intervals import Interval, interval
from ..lab import Lab
from ..plan import Plan
from ..recipe import ADAMW, ADAMW_BETA, EVEN, find_best, HEADS, Size, START
from ..recipe import DEFAULT as ONE_RATE
from ..run import Run
from ..section import Section
from ..style import losses_over
from ..texts import CHECK
from ..tuning import AXES, tuned
from .rate_rule import rule


SEEDS = 5
RISING: dict[str, Any] = dict(beta=0.95, beta_from=0.85)
OLD, NEW = "beta 0.95", "rising beta, heads"
EVENLY = "rising beta, heads, evenness"
ADAMW_BOTH = "AdamW, b1 and b2 tuned"
ARMS: dict[str, dict[str, Any]] = {
    OLD: dict(beta=0.95),
    "beta 0.95, heads": HEADS | dict(beta=0.95),
    "rising beta": RISING,
    NEW: RISING | HEADS,
    EVENLY: RISING | HEADS | dict(muon=(EVEN,)),
}
# Each against the arm without it.
PARTS = {
    "rising beta": ("rising beta", OLD),
    "heads": (NEW, "rising beta"),
    "evenness": (EVENLY, NEW),
}


class Model(NamedTuple):
    """A size, and the arms that are trained there."""

    settings: dict[str, Any]
    arms: Sequence[str] = tuple(ARMS)
    tunes_b2: bool = False


# Each begins where the one before ended.
MODELS = {
    "24,576": Model(dict(layers=2, width=32, heads=2), tunes_b2=True),
    "147,456": Model(dict(layers=3, width=64, heads=4), arms=("rising beta", NEW)),
}


Key = tuple[str, str]  # corpus, size


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    draw(plan, found)
    check = " and ".join(CHECK)
    return Section(
        title="Defaults",
        claim="modded-nanogpt: beta rising from 0.85 to 0.95 over 300 steps. Kimi K3 "
        "(arXiv:2607.24653), GLM-5 and Qwen: a matrix for each head. MuonEq "
        "(arXiv:2603.28254): rows and columns of the momentum made even.",
        setting="400 steps of 1,024 bytes, cosine schedule. As one calls "
        "`mc.muonclip(learning_rate)`: one learning rate for all parameters, all "
        "that is tuned, weight decay 0.1. AdamW's learning rate and weight decay are "
        "tuned, in one arm its b1 too, and in the smallest model its b2. Nothing was "
        f"chosen by the losses on the third text ({check}). {SEEDS} seeds.",
        tables=[part_table(found), loss_table(found)],
        parts=parts_of_claim(found),
        figure="defaults.png",
        remarks="A part counts as reproduced if it lowers the loss beyond its interval "
        "on every text and in every model where it was tried. Heads have more "
        "comparisons in the experiment on recipes.",
    )


def measured(lab: Lab, plan: Plan) -> dict[Key, Trained]:
    """AdamW and each arm."""
    best: dict[Key, dict[str, Run]] = {}
    before: dict[str, dict[str, Run]] = {}  # the settings found in the smaller model
    for size, model in MODELS.items():
        for corpus in plan.all_corpora:
            before[corpus] = walk(lab, plan, corpus, model, before.get(corpus, {}))
            best[corpus, size] = before[corpus]
    return train(lab, plan, best, SEEDS)


def walk(
    lab: Lab, plan: Plan, corpus: str, model: Model, before: dict[str, Run]
) -> dict[str, Run]:
    """AdamW as in the experiments on recipes; of each arm the learning rate alone."""
    baselines = Size(model.settings, arms=(ADAMW, ADAMW_BETA))
    best = find_best(lab, plan, corpus, baselines, before)
    if model.tunes_b2:
        start = best[ADAMW_BETA].but(b2=0.95)  # which it had
        best[ADAMW_BOTH] = tuned(lab, start, (*AXES, "beta", "b2"))
    # Where one would begin who knows AdamW's rate.
    rate = rule(best[ADAMW].learning_rate)
    for arm in model.arms:
        start = START[ONE_RATE] | model.settings | ARMS[arm]
        run = plan.run(corpus, **start)
        run = run.but(learning_rate=rate, adam_learning_rate=rate)
        best[arm] = tuned(lab, run, ("learning_rate",), one_rate=True)
    return best


def gained(m: Trained, part: str) -> Interval | None:
    """What a part adds to the loss, where both arms were trained."""
    return m.over(*PARTS[part]) if m.best.keys() >= {*PARTS[part]} else None


def parts_of_claim(found: dict[Key, Trained]) -> dict[str, list[bool]]:
    differences = {
        part: [gained(measured, part) for measured in found.values()] for part in PARTS
    }
    return {
        f"{part}: a lower loss": [one.high < 0 for one in of_part if one is not None]
        for part, of_part in differences.items()
    }


def part_table(found: dict[Key, Trained]) -> Table:
    entries = [
        [corpus, size, *(shown(gained(measured, part)) for part in PARTS)]
        for (corpus, size), measured in found.items()
        if any(gained(measured, part) for part in PARTS)
    ]
    caption = "What each part adds to the loss, in nats per byte, with the 95 % "
    caption += "interval; negative is better."
    return Table(["corpus", "matrix parameters", *PARTS], entries, caption)


def shown(difference: Interval | None) -> str:
    return "-" if difference is None else difference.difference()


def loss_table(found: dict[Key, Trained]) -> Table:
    columns = ["corpus", "matrix parameters", "", "loss", "rate", "decay"]
    entries = [
        [
            corpus,
            size,
            arm,
            interval(m.losses(arm)).show(),
            f"{run.learning_rate:.2g}",
            f"{run.weight_decay:g}",
        ]
        for (corpus, size), m in found.items()
        for arm, run in m.best.items()
    ]
    return Table(columns, entries, "Losses in nats per byte after all steps.")


def draw(plan: Plan, found: dict[Key, Trained]) -> None:
    means = {
        key: {
            part: difference
            for part in PARTS
            if (difference := gained(measured, part)) is not None
        }
        for key, measured in found.items()
    }
    means = {key: of_key for key, of_key in means.items() if of_key}
    titles = [f"{corpus}: {size} parameters" for corpus, size in means]
    file, rows = plan.figures / "defaults.png", 1 if len(means) % 2 else 2
    with panels(file, titles, rows=rows, xlabel="nats per byte") as axes:
        for one, of_key in zip(axes, means.values(), strict=True):
            losses_over(one, of_key)

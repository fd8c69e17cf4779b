"""The recipe in a model twenty times as large as those in which it was found."""

from ..lab import Lab
from ..plan import Plan
from ..recipe import (
    ADAMW,
    ADAMW_BETA,
    ALL,
    bounds,
    DEFAULT,
    draw,
    find_best,
    measure_best,
    MUON,
    part_table,
    rate_table,
    reached,
    SEEDS,
    share_table,
    Size,
)
from ..section import Section
from . import recipes


NAME = "3,145,728"
SIZE = Size(
    dict(layers=4, width=256, heads=4),
    axes=("learning_rate",),
    arms=(ADAMW, ADAMW_BETA, MUON, ALL, DEFAULT),
    shares={MUON: (0.7, 1.0), ALL: (0.4, 0.52), DEFAULT: (0.52, 0.7)},
)


def experiment(lab: Lab, plan: Plan) -> Section:
    found = {}
    for corpus in plan.corpora:
        *_, before = recipes.walks(lab, plan, corpus).values()
        best = find_best(lab, plan, corpus, SIZE, before)
        found[corpus, NAME] = measure_best(lab, plan, SIZE, best)
    draw(plan.figures / "recipe_at_scale.png", len(plan.corpora), found)
    return Section(
        title="The recipe in a larger model",
        claim="What is best in a small model is best in a larger one.",
        setting="4 layers of width 256, otherwise as in the experiment on recipes. The "
        "learning rate alone is tuned; the rest is that of the model of width 64, with "
        "half of the rate of Muon's AdamW side for four times the width. "
        f"{SEEDS} seeds.",
        tables=[share_table(found), part_table(found), rate_table(found)],
        parts=reached(list(found.values())),
        figure="recipe_at_scale.png",
        remarks=f"It counts as reproduced if, on every corpus, {bounds()}",
    )

"""What to add to Muon, and what comes of all of it: a recipe, part by part."""

from collections.abc import Mapping

from ..lab import Lab
from ..plan import Plan
from ..recipe import (
    difference,
    draw,
    find_best,
    Key,
    measure_best,
    Measured,
    part_table,
    PARTS,
    rate_table,
    SEEDS,
    share_table,
    Size,
)
from ..run import Run
from ..section import Section


SIZES = {
    "24,576": Size(dict(layers=2, width=32, heads=2)),
    "147,456": Size(dict(layers=3, width=64, heads=4)),
}


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    draw(plan.figures / "recipes.png", len(plan.corpora), found)
    return Section(
        title="Recipes",
        claim="NorMuon (arXiv:2510.05491): 21.7 % fewer steps than AdamW and 11.3 % "
        "fewer than Muon at 1.1 B parameters. Cautious weight decay "
        "(arXiv:2510.12402): a lower loss at no cost. Kimi K3 (arXiv:2607.24653): a "
        "matrix for each head. modded-nanogpt: tuning AdamW's parameters is worth as "
        "much as NorMuon.",
        setting="400 steps of 1,024 bytes, cosine schedule. Every arm is tuned by "
        "the same walk as in the experiment on token efficiency, on all axes that it "
        "has: learning rate, weight decay, decay of the momentum (b1 of AdamW, beta of "
        "Muon) and the rate of AdamW's parameters. AdamW's b1 is 0.9 in one "
        "arm, as everywhere else in this report, and tuned in another. The baseline "
        "is a Muon that is tuned in full. The last arm has one matrix per head, beta "
        "0.95 and one learning rate, which is all that is tuned: the "
        f"experiment on defaults goes on from it. {SEEDS} seeds.",
        tables=[share_table(found), part_table(found), rate_table(found)],
        parts={
            f"{part}: a lower loss": [
                difference(measured, part).high < 0 for measured in found.values()
            ]
            for part in PARTS
        },
        figure="recipes.png",
        remarks="It counts as reproduced if, on every corpus and in both models, "
        "every part lowers the loss beyond its interval.",
    )


def measured(lab: Lab, plan: Plan) -> dict[Key, Measured]:
    return {
        (corpus, size): measure_best(lab, plan, SIZES[size], best)
        for corpus in plan.corpora
        for size, best in walks(lab, plan, corpus).items()
    }


def walks(lab: Lab, plan: Plan, corpus: str) -> dict[str, dict[str, Run]]:
    """The best of each arm, size by size, since each begins where the last ended."""
    found: dict[str, dict[str, Run]] = {}
    best: Mapping[str, Run] = {}
    for name, size in SIZES.items():
        found[name] = best = find_best(lab, plan, corpus, size, best)
    return found

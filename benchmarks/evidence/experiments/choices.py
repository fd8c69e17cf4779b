"""What the choices within Muon do to the loss."""

from typing import Any

from pictures import panels
from tables import Table

from ..arms import train
from ..intervals import Interval
from ..lab import Lab
from ..plan import Plan
from ..run import Run
from ..section import Section
from ..style import losses_over
from ..tuning import tuned_pair


SEEDS, SAME = 5, 0.02


def muon(**arguments: Any) -> dict[str, Any]:
    return dict(muon=tuple(arguments.items()))


CHOICES: dict[str, dict[str, Any]] = {
    "without Nesterov": muon(nesterov=False),
    "3 steps": muon(ns_steps=3),
    "4 steps": muon(ns_steps=4),
    "6 steps": muon(ns_steps=6),
    "8 steps": muon(ns_steps=8),
    "quintic": muon(ns_coeffs="quintic"),
    "Polar Express": muon(ns_coeffs="polar_express"),
    "Polar Express, 6 steps": muon(ns_coeffs="polar_express_6", ns_steps=6),
    "CANS": muon(ns_coeffs="cans"),
    "Turbo-Muon, 4 steps": muon(
        ns_coeffs="turbo_muon", ns_steps=4, preconditioning="aol"
    ),
    "DeepSeek-V4, 10 steps": muon(ns_coeffs="deepseek_v4", ns_steps=10),
    "momentum in bfloat16": muon(mu_dtype="bfloat16"),
    "momentum in 8 bits": muon(mu_dtype="int8"),
    "one matrix per head": dict(matrices="per_head"),
    "query, key and value fused": dict(fused=True),
    "experts in one matrix": dict(model="kimi_k2", matrices="one_expert_matrix"),
    "experts by AdamW": dict(model="kimi_k2", matrices="adam_experts"),
}
HARMLESS = ("Polar Express", "momentum in bfloat16", "one matrix per head")
ENOUGH = ("6 steps", "8 steps")
WORSE = ("query, key and value fused", "experts by AdamW", "without Nesterov")


def experiment(lab: Lab, plan: Plan) -> Section:
    differences = compared(lab, plan)
    draw(plan, differences)
    return Section(
        title="Choices",
        claim="Keller Jordan: Nesterov's momentum is better, five steps of "
        "Newton-Schulz are enough, and query, key and value are better "
        "orthogonalized apart. nanochat: Polar Express and matrices per head make no "
        "noticeable difference; Kimi K3 (arXiv:2607.24653) has them per head. "
        "DeepSpeed, Megatron: momentum in bfloat16.",
        setting="3 layers of width 64, 400 steps, cosine schedule. The default: "
        "Keller's coefficients, 5 steps, Nesterov, one matrix for each of query, key "
        "and value; its rate and weight decay are tuned, and kept for every choice. "
        f"Each choice is paired with the default over {SEEDS} seeds. Experts: Kimi K2 "
        "in miniature, with 8 experts in two of its 3 layers, at the same rates; the "
        "default there is one matrix per expert.",
        tables=[table(plan, differences)],
        parts={
            said(name): [
                held for (_, of), held in holds(differences).items() if of == name
            ]
            for name in dict.fromkeys(of for _, of in holds(differences))
        },
        figure="choices.png",
        remarks="It counts as reproduced if, on every corpus, the intervals of Polar "
        f"Express, bfloat16 momentum and matrices per head are within {SAME:g} nats of "
        f"the default, 6 or 8 steps gain less than {SAME:g}, and fused kernels, "
        "experts by AdamW and momentum without Nesterov are worse beyond the interval. "
        + failed(differences),
    )


def compared(lab: Lab, plan: Plan) -> dict[tuple[str, str], Interval]:
    """Each choice's loss over the default's, by corpus and choice."""
    sides: dict[tuple[str, str], dict[str, Run]] = {}
    for corpus in plan.corpora:
        best = tuned_pair(lab, plan, corpus).muon
        for name in plan.some(list(CHOICES)):
            # Its model's default.
            default = best.but(model=CHOICES[name].get("model", best.model))
            chosen = default.but(**CHOICES[name])
            sides[corpus, name] = {"default": default, "chosen": chosen}
    found = train(lab, plan, sides, SEEDS)
    return {key: of.over("chosen", "default") for key, of in found.items()}


def holds(differences: dict[tuple[str, str], Interval]) -> dict[tuple[str, str], bool]:
    """The parts of the claim."""
    parts = {}
    for key, d in differences.items():
        if key[1] in HARMLESS:
            parts[key] = d.low > -SAME and d.high < SAME
        if key[1] in ENOUGH:
            parts[key] = d.low > -SAME
        if key[1] in WORSE:
            parts[key] = d.low > 0
    return parts


def said(name: str) -> str:
    """The claim about a choice."""
    if name in HARMLESS:
        return f"{name} within {SAME:g} nats"
    return f"{name} worse" if name in WORSE else f"{name} gain nothing"


def failed(differences: dict[tuple[str, str], Interval]) -> str:
    names = [
        f"{name} ({of})" for (of, name), held in holds(differences).items() if not held
    ]
    return f"Not so: {', '.join(names)}." if names else ""


def table(plan: Plan, differences: dict[tuple[str, str], Interval]) -> Table:
    names = list(dict.fromkeys(name for _, name in differences))
    rows = [
        [name, *(differences[corpus, name].difference() for corpus in plan.corpora)]
        for name in names
    ]
    caption = "Loss difference from the default; positive is worse."
    return Table(["choice", *plan.corpora], rows, caption)


def draw(plan: Plan, differences: dict[tuple[str, str], Interval]) -> None:
    label = "loss over the default's, nats per byte"
    with panels(plan.figures / "choices.png", plan.corpora, xlabel=label) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=True):
            means = {name: d for (of, name), d in differences.items() if of == corpus}
            losses_over(one, means)

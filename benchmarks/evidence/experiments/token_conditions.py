"""What the tokens that Muon saves depend on: the batch, the length, the tuning."""

from typing import Any

from pictures import panels

from ..intervals import interval
from ..lab import Lab
from ..plan import Plan
from ..section import Section, Table, verdict
from ..style import CYCLE
from ..tuning import AXES, Pair, tuned, tuned_pair
from .token_efficiency import lengths, measure, Outcome, said, SIZES


SEEDS = 6
BASE = "16 sequences, 400 steps"
CONDITIONS: dict[str, dict[str, Any]] = {
    "4 sequences": dict(batch=4),
    BASE: {},
    "64 sequences": dict(batch=64),
    "1,600 steps": dict(steps=1600),
}
LENGTHS, SIDE = "rates tuned for every length", "AdamW side tuned too"
BATCHES = ("4 sequences", BASE, "64 sequences")

Outcomes = dict[tuple[str, str], Outcome]  # by corpus and condition


def experiment(lab: Lab, plan: Plan) -> Section:
    outcomes = {
        (corpus, condition): outcome
        for corpus in plan.corpora
        for condition, outcome in measure_all(lab, plan, corpus).items()
    }
    draw(plan, outcomes)
    base = [interval(outcomes[c, BASE].shares).mean for c in plan.corpora]
    return Section(
        title="What token efficiency depends on",
        claim="Essential AI (arXiv:2505.02222): Muon needs 10 to 15 % fewer tokens and "
        "keeps its advantage as batches grow, where AdamW loses efficiency.",
        setting="The smallest model of the experiment on token efficiency (2 layers of "
        f"width 32, cosine schedule; {BASE} of 64 bytes there), both optimizers tuned "
        "anew for every batch and number of steps. Then two things that were kept "
        "there: Muon's rates are tuned for every length of its runs, and the rate of "
        f"its AdamW side is tuned along with the two others. {SEEDS} seeds.",
        tables=[table(outcomes)],
        verdict=verdict(grows(outcomes, corpus) for corpus in plan.corpora),
        figure="token_conditions.png",
        remarks="It counts as reproduced if, on every corpus, Muon saves at least as "
        "many tokens with the largest batch as with the smallest. Of AdamW's tokens it "
        f"needs {said(dict(zip(plan.corpora, base, strict=True)))} with {BASE}; least "
        f"are {least(plan, outcomes)}.",
    )


def measure_all(lab: Lab, plan: Plan, corpus: str) -> dict[str, Outcome]:
    """By condition."""
    pairs = {
        condition: tuned_pair(lab, plan, corpus, **SIZES[0], **changes)
        for condition, changes in CONDITIONS.items()
    }
    outcomes = {
        condition: measure(lab, plan, pair, lengths(pair.muon), SEEDS)
        for condition, pair in pairs.items()
    }
    adamw, muon = pairs[BASE]
    anew = [tuned(lab, run) for run in lengths(muon)]
    outcomes[LENGTHS] = measure(lab, plan, pairs[BASE], anew, SEEDS)
    muon = tuned(lab, muon, (*AXES, "adam_learning_rate"))
    outcomes[SIDE] = measure(lab, plan, Pair(adamw, muon), lengths(muon), SEEDS)
    return outcomes


def grows(outcomes: Outcomes, corpus: str) -> bool:
    smallest, *_, largest = (interval(outcomes[corpus, b].shares) for b in BATCHES)
    return largest.mean <= smallest.mean


def least(plan: Plan, outcomes: Outcomes) -> str:
    """The condition with the smallest share, by corpus."""
    found = []
    for corpus in plan.corpora:
        shares = {
            condition: interval(outcome.shares).mean
            for (of, condition), outcome in outcomes.items()
            if of == corpus
        }
        condition = min(shares, key=lambda name: shares[name])
        found.append(f"{shares[condition]:.0%} ({corpus}, {condition})")
    return " and ".join(found)


def table(outcomes: Outcomes) -> Table:
    columns = ["corpus", "", "AdamW: rate, decay", "Muon: rate, decay, AdamW side"]
    columns += ["AdamW's loss", "Muon's loss", "AdamW's tokens"]
    rows = [
        [
            corpus,
            condition,
            f"{outcome.pair.adamw.learning_rate:.2g}, "
            f"{outcome.pair.adamw.weight_decay:g}",
            f"{outcome.pair.muon.learning_rate:.2g}, "
            f"{outcome.pair.muon.weight_decay:g}, "
            f"{outcome.pair.muon.adam_learning_rate:.2g}",
            *(interval(losses).show() for losses in outcome.ends.values()),
            share(outcome),
        ]
        for (corpus, condition), outcome in outcomes.items()
    ]
    return Table(columns, rows, "Losses in nats per byte, ± the 95 % interval.")


def share(outcome: Outcome) -> str:
    of = interval(outcome.shares)
    return f"{of.mean:.0%} ± {of.half:.0%}"


def draw(plan: Plan, outcomes: Outcomes) -> None:
    conditions = list(dict.fromkeys(condition for _, condition in outcomes))
    file, label = plan.figures / "token_conditions.png", "share of AdamW's tokens"
    with panels(file, plan.corpora, xlabel=label) as axes:
        for (corpus, condition), outcome in outcomes.items():
            one, y = (
                axes[list(plan.corpora).index(corpus)],
                -conditions.index(condition),
            )
            of = interval(outcome.shares)
            one.plot(outcome.shares, [y] * len(outcome.shares), ".", color=CYCLE[1])
            one.errorbar(of.mean, y, xerr=of.half, fmt="o", color=CYCLE[1])
            one.set_yticks([-i for i in range(len(conditions))], conditions)
            one.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")

"""What the tokens that Muon saves depend on: the batch, the length, the tuning."""

from typing import Any

import numpy as np
from pictures import panels
from tables import Table

from ..intervals import Interval, paired
from ..lab import Lab
from ..plan import Plan
from ..section import Section
from ..style import CYCLE, rows
from ..tokens import CAPTION, COLUMNS, lengths, measure, Outcome, SHARES
from ..tuning import AXES, Pair, tuned, tuned_pair


SMALL: dict[str, Any] = dict(layers=2, width=32, heads=2)
LARGE: dict[str, Any] = dict(layers=4, width=96, heads=6)
SEEDS, SEEDS_OF_LARGE = 6, 3
BASE, LARGE_BATCH, LONG = "16 sequences, 400 steps", "64 sequences", "1,600 steps"
CONSTANT = "a constant rate"
CONDITIONS: dict[str, dict[str, Any]] = {
    "4 sequences": dict(batch=4),
    BASE: {},
    LARGE_BATCH: dict(batch=64),
    LONG: dict(steps=1600),
    CONSTANT: dict(schedule="constant"),
}
LENGTHS, SIDE = "rates tuned for every length", "AdamW's parameters tuned too"
PER_HEAD, UNTUNED = "one matrix per head", "AdamW at 1/4 of its rate"
HEADS_OF_LARGE = f"one matrix per head, width {LARGE['width']}"
BOTH = f"and AdamW's, width {LARGE['width']}"
FEWER = 0.9  # of AdamW's tokens

Outcomes = dict[str, Outcome]  # by condition


def experiment(lab: Lab, plan: Plan) -> Section:
    outcomes = {corpus: measure_all(lab, plan, corpus) for corpus in plan.corpora}
    draw(plan, outcomes)
    return Section(
        title="What token efficiency depends on",
        claim="Essential AI (arXiv:2505.02222): Muon needs 10 to 15 % fewer tokens and "
        "keeps its advantage as batches grow, where AdamW loses efficiency.",
        setting=f"2 layers of width {SMALL['width']}, sequences of 64 bytes, cosine "
        f"schedule unless the row says otherwise; {BASE} where it says nothing. Both "
        "optimizers have learning rate and weight decay tuned anew for every batch, "
        "number of steps and schedule, by a walk with one seed and another part of the "
        "text; AdamW's parameters keep AdamW's best rate. Muon is also trained for "
        f"{', '.join(f'{s:.0%}' for s in SHARES[:-1])} of the steps, each with a "
        "schedule of its own; tokens are interpolated in their logarithm. Under the "
        "constant rate they are read off the curve. Then three things change in turn: "
        "Muon's rates are tuned for every length of its runs; the rate of AdamW's "
        "parameters is tuned along with the two others; every head is a matrix of its "
        f"own, there and in {LARGE['layers']} layers of width {LARGE['width']}, where "
        "AdamW's parameters are tuned too. In the last row the goal is the loss of an "
        f"AdamW at a quarter of its best rate. {SEEDS} seeds, of the wide model "
        f"{SEEDS_OF_LARGE}.",
        tables=[table(outcomes)],
        parts={
            f"at most {FEWER:.0%} of the tokens with a large batch": [
                saves(of[LARGE_BATCH]) for of in outcomes.values()
            ],
            "no larger a share than in the long run": [
                difference(of).low <= 0 for of in outcomes.values()
            ],
        },
        figure="token_conditions.png",
        remarks=f"{LARGE_BATCH} for 400 steps are as many tokens as 16 for "
        f"{LONG}: with the large batch the share of AdamW's tokens is "
        f"{differences(outcomes)}. It counts as reproduced if, on every corpus, the "
        f"interval with the large batch ends below {FEWER:.0%} and the share is not "
        f"larger there than in the long run beyond the interval. {least(outcomes)} "
        f"The shortest run is {min(SHARES):.0%}: a smaller share is shown as that. "
        "The row of the constant rate and the last four were added when the others "
        "were known.",
    )


def measure_all(lab: Lab, plan: Plan, corpus: str) -> Outcomes:
    pairs = {
        condition: tuned_pair(lab, plan, corpus, **SMALL, **changes)
        for condition, changes in CONDITIONS.items()
    }
    outcomes = {
        condition: measure(lab, plan, pair, lengths(pair.muon), SEEDS)
        for condition, pair in pairs.items()
    }
    anew = [tuned(lab, run) for run in lengths(pairs[BASE].muon)]
    outcomes[LENGTHS] = measure(lab, plan, pairs[BASE], anew, SEEDS)
    large = per_head(lab, tuned_pair(lab, plan, corpus, **LARGE))
    for condition, pair, seeds in (
        (SIDE, side_tuned(lab, pairs[BASE]), SEEDS),
        (PER_HEAD, per_head(lab, pairs[BASE]), SEEDS),
        (HEADS_OF_LARGE, large, SEEDS_OF_LARGE),
        (BOTH, side_tuned(lab, large), SEEDS_OF_LARGE),
        (UNTUNED, untuned(pairs[BASE]), SEEDS),
    ):
        outcomes[condition] = measure(lab, plan, pair, lengths(pair.muon), seeds)
    return outcomes


def side_tuned(lab: Lab, pair: Pair) -> Pair:
    return pair._replace(muon=tuned(lab, pair.muon, (*AXES, "adam_learning_rate")))


def per_head(lab: Lab, pair: Pair) -> Pair:
    return pair._replace(muon=tuned(lab, pair.muon.but(matrices="per_head")))


def untuned(pair: Pair) -> Pair:
    rate = pair.adamw.learning_rate / 4
    return pair._replace(adamw=pair.adamw.but(learning_rate=rate))


def saves(outcome: Outcome) -> bool:
    return outcome.share.high <= FEWER


def difference(outcomes: Outcomes) -> Interval:
    """Compares the shares with the large batch and in the long run, tokens alike."""
    return paired(outcomes[LARGE_BATCH].shares, outcomes[LONG].shares)


def differences(outcomes: dict[str, Outcomes]) -> str:
    found = {corpus: difference(of) for corpus, of in outcomes.items()}
    return " and ".join(
        f"{100 * d.mean:+.0f} points ({100 * d.low:+.0f} to {100 * d.high:+.0f}, {of})"
        for of, d in found.items()
    )


def least(outcomes: dict[str, Outcomes]) -> str:
    """The condition with the smallest share of a tuned AdamW's tokens, by corpus."""
    found = []
    for corpus, of in outcomes.items():
        shares = {condition: outcome.share.mean for condition, outcome in of.items()}
        of_untuned = shares.pop(UNTUNED)
        condition = min(
            shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf)
        )
        found.append(
            f"{shares[condition]:.0%} ({corpus}, {condition}; against the untuned "
            f"AdamW {of_untuned:.0%})"
        )
    return f"The smallest shares are {' and '.join(found)}."


def table(outcomes: dict[str, Outcomes]) -> Table:
    columns = ["corpus", "", "AdamW: rate, decay"]
    columns.append("Muon: rate, decay, rate of AdamW's parameters")
    entries = [
        [corpus, condition, *rates(outcome.pair), *outcome.row()]
        for corpus, of in outcomes.items()
        for condition, outcome in of.items()
    ]
    return Table([*columns, *COLUMNS], entries, CAPTION)


def rates(pair: Pair) -> list[str]:
    both = [f"{run.learning_rate:.2g}, {run.weight_decay:g}" for run in pair]
    return [both[0], f"{both[1]}, {pair.muon.adam_learning_rate:.2g}"]


def draw(plan: Plan, outcomes: dict[str, Outcomes]) -> None:
    file, label = plan.figures / "token_conditions.png", "tokens, % of AdamW's"
    with panels(file, plan.corpora, xlabel=label) as axes:
        for one, of in zip(axes, outcomes.values(), strict=True):
            rows(one, {c: o.share for c, o in of.items()}, color=CYCLE[1])
            one.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")

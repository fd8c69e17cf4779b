"""What to add to Muon: the arms, their best settings, and what they come to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pictures import panels
from tables import Table

from .intervals import Interval, interval, paired
from .lab import Lab, losses
from .plan import Plan
from .run import Run
from .style import losses_over
from .tokens import lengths, Outcome, reported
from .tokens import measure as measure_share
from .tuning import AXES, Pair, tuned


SEEDS = 5


class Arm(NamedTuple):
    """What an optimizer is told, and what of it is tuned."""

    changes: dict[str, Any]
    axes: tuple[str, ...]
    one_rate: bool = False


MUON_AXES = (*AXES, "adam_learning_rate", "beta")
HEADS: dict[str, Any] = dict(matrices="per_head")
NEURONS, CAUTIOUS = ("neuron_b2", 0.95), ("cautious_weight_decay", True)
EVEN = ("preconditioning", "equilibrated")

ADAMW, ADAMW_BETA, MUON = "AdamW", "AdamW, b1 tuned", "Muon"
ALL, DEFAULT = "heads, neurons and cautious decay", "one rate, beta 0.95, heads"
STATELESS = "heads, evenness and cautious decay"
PARTS = {
    "one matrix per head": HEADS,
    "neurons normalized": dict(muon=(NEURONS,)),
    "rows and columns even": dict(muon=(EVEN,)),
    "cautious decay": dict(muon=(CAUTIOUS,)),
}
ARMS = {
    ADAMW: Arm(dict(optimizer="adamw", beta=0.9), AXES),
    ADAMW_BETA: Arm(dict(optimizer="adamw"), (*AXES, "beta")),
    MUON: Arm({}, MUON_AXES),
    **{name: Arm(changes, MUON_AXES) for name, changes in PARTS.items()},
    STATELESS: Arm(HEADS | dict(muon=(CAUTIOUS, EVEN)), MUON_AXES),
    ALL: Arm(HEADS | dict(muon=(CAUTIOUS, NEURONS)), MUON_AXES),
    DEFAULT: Arm(HEADS | dict(beta=0.95), ("learning_rate",), one_rate=True),
}
# Of AdamW's steps, each with a schedule of its own.
SHARES = {
    MUON: (0.35, 0.5, 0.7, 1.0),
    ALL: (0.35, 0.5, 0.7, 1.0),
    DEFAULT: (0.5, 0.7, 1.0),
}


class Size(NamedTuple):
    """A model, and how much is spent on it."""

    settings: dict[str, Any]
    axes: tuple[str, ...] | None = None  # all of an arm's, or only these
    arms: Sequence[str] = tuple(ARMS)
    shares: Mapping[str, Sequence[float]] = SHARES


Key = tuple[str, str]  # corpus, size


class Measured(NamedTuple):
    """One size on one corpus: the settings found, and losses seed by seed."""

    best: dict[str, Run]
    losses: dict[str, list[float]]  # after all steps
    outcomes: dict[tuple[str, str], Outcome]  # arm, and the AdamW it is held against


def find_best(
    lab: Lab, plan: Plan, corpus: str, size: Size, before: Mapping[str, Run]
) -> dict[str, Run]:
    """The best settings of each arm, from those of the size before on."""
    best: dict[str, Run] = {}
    model = plan.run(corpus, **size.settings)  # of fewer layers, if it is to be quick
    for name in size.arms:
        arm = ARMS[name]
        settings = size.settings | arm.changes
        if name in before:
            shape = {key: getattr(model, key) for key in size.settings}
            start = wider(before[name].but(**shape), before[name].width)
        elif MUON in best and name != DEFAULT:
            start = best[MUON].but(**arm.changes)
        else:
            start = plan.run(corpus, **START[name] | settings)
        axes = arm.axes if size.axes is None else size.axes
        best[name] = tuned(lab, start, plan.axes(axes), one_rate=arm.one_rate)
    return best


START = {
    ADAMW: dict(learning_rate=3.2e-2, weight_decay=0.3),
    ADAMW_BETA: dict(learning_rate=1.6e-2, weight_decay=0.3, beta=0.7),
    MUON: dict(
        learning_rate=3.2e-2, weight_decay=0.1, beta=0.8, adam_learning_rate=3.2e-2
    ),
    DEFAULT: dict(learning_rate=3.2e-2, weight_decay=0.1, adam_learning_rate=3.2e-2),
}


def wider(run: Run, width: int) -> Run:
    """Where a wider model begins; only four times the width is far away."""
    if run.width < 4 * width:
        return run
    return run.but(
        learning_rate=run.learning_rate / 2,
        adam_learning_rate=run.adam_learning_rate / 2,
    )


def measure_best(lab: Lab, plan: Plan, size: Size, best: Mapping[str, Run]) -> Measured:
    by_length = {
        arm: lengths(run, size.shares.get(arm, (1.0,))) for arm, run in best.items()
    }
    runs = {
        (arm, run.steps): reported(plan, run, SEEDS)
        for arm, of_arm in by_length.items()
        for run in of_arm
    }
    found = lab.gather(runs)  # all of them together
    ends = {arm: found.get((arm, run.steps)) for arm, run in best.items()}
    outcomes = {
        (arm, goal): measure_share(
            lab, plan, Pair(best[goal], best[arm]), by_length[arm], SEEDS
        )
        for arm in size.shares
        for goal in GOALS
    }
    last = {arm: losses(results) for arm, results in ends.items() if results}
    return Measured(dict(best), last, outcomes)


def difference(measured: Measured, arm: str) -> Interval:
    return paired(measured.losses[arm], measured.losses[MUON])


def share_table(found: Mapping[Key, Measured]) -> Table:
    columns = ["corpus", "matrix parameters", "", f"tokens over {ADAMW}'s"]
    columns.append(f"over those of {ADAMW_BETA}")
    of_models = {model: measured.outcomes for model, measured in found.items()}
    entries = [
        [corpus, size, arm, *(outcomes[arm, goal].show_share() for goal in GOALS)]
        for (corpus, size), outcomes in of_models.items()
        for arm in SHARES
    ]
    caption = (
        "Share of the tokens of a tuned AdamW, ± the 95 % interval, or a bound where "
        "no shorter or longer runs were made."
    )
    return Table(columns, entries, caption)


GOALS = (ADAMW, ADAMW_BETA)


def part_table(found: Mapping[Key, Measured]) -> Table:
    entries = [
        [corpus, size, arm, interval(loss).show(), show_difference(measured, arm)]
        for (corpus, size), measured in found.items()
        for arm, loss in measured.losses.items()
    ]
    columns = ["corpus", "matrix parameters", "", "loss", f"over {MUON}'s"]
    caption = "Losses in nats per byte after all steps; negative is better."
    return Table(columns, entries, caption)


def show_difference(measured: Measured, arm: str) -> str:
    return "-" if arm == MUON else difference(measured, arm).difference()


def rate_table(found: Mapping[Key, Measured]) -> Table:
    columns = ["corpus", "matrix parameters", "", "rate", "decay", "momentum"]
    columns.append("rate of AdamW's parameters")
    entries = [
        [
            corpus,
            size,
            arm,
            f"{run.learning_rate:.2g}",
            f"{run.weight_decay:g}",
            f"{run.beta:g}",
            "-" if run.optimizer == "adamw" else f"{run.adam_learning_rate:.2g}",
        ]
        for (corpus, size), measured in found.items()
        for arm, run in measured.best.items()
    ]
    return Table(columns, entries, "What the walks found.")


def draw(file: Path, corpora: int, found: Mapping[Key, Measured]) -> None:
    titles = [f"{corpus}: {size} parameters" for corpus, size in found]
    label = f"nats per byte over {MUON}"
    with panels(file, titles, rows=corpora, xlabel=label) as axes:
        for one, measured in zip(axes, found.values(), strict=True):
            arms = [arm for arm in measured.losses if arm != MUON]
            means = {arm: difference(measured, arm) for arm in arms}
            losses_over(one, means)

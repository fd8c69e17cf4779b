"""What cheaper iterations cost and expensive ones gain, at equal tokens and work."""

from typing import Any, NamedTuple

import numpy as np
from pictures import panels
from tables import Table

from ..arms import train
from ..intervals import Interval, interval, paired
from ..iterations import BLOCKS, iteration_flop, step_flop
from ..lab import Lab
from ..plan import Plan
from ..recipe import DEFAULT as ONE_RATE
from ..recipe import HEADS, START
from ..run import Run
from ..section import Section
from ..style import around_zero, CYCLE, rows
from ..tuning import tuned
from .choices import muon
from .defaults import RISING


SEEDS, SAME = 5, 0.01
MODEL = dict(layers=3, width=64, heads=4)
# Of the default's steps: what the same work comes to with the cheapest and the dearest.
LENGTHS = (0.85, 1.0, 1.15)
DEFAULT, CUBIC, PLUS, MORE = "5 steps", "cubic5", "Muon+", "8 steps"
ARMS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "3 steps": muon(ns_steps=3),
    "4 steps": muon(ns_steps=4),
    MORE: muon(ns_steps=8),
    CUBIC: muon(ns_coeffs=CUBIC),
    "exact": dict(candidate="exact"),
    "Gram in bfloat16": dict(candidate="Gram in bfloat16"),
    PLUS: dict(candidate=PLUS),
    "every second step": dict(candidate="every second step"),
    "every fourth step": dict(candidate="every fourth step"),
    "every fourth step, blocks between": dict(
        candidate="every fourth step, blocks between"
    ),
}
CLAIMED = (DEFAULT, CUBIC, PLUS, MORE)


class Measured(NamedTuple):
    """All arms on one text."""

    best: dict[str, Run]
    losses: dict[str, list[float]]
    default: dict[int, list[float]]  # by steps, seed by seed

    def at_equal_tokens(self, arm: str) -> Interval:
        return paired(self.losses[arm], self.losses[DEFAULT])

    def at_equal_work(self, arm: str) -> Interval | None:
        """Over the default after as much arithmetic, between its lengths."""
        run = self.best[arm]
        work, of_default = flop(run, arm), flop(run, DEFAULT)
        if work is None or of_default is None:
            return None
        at = np.log(run.steps * work / of_default)
        steps = np.log(list(self.default))
        ends = [
            np.interp(at, steps, of) for of in zip(*self.default.values(), strict=True)
        ]
        return paired(self.losses[arm], ends)


def flop(run: Run, arm: str) -> float | None:
    """Arithmetic of a whole step; unknown of a decomposition, and of short floats."""
    counts = {DEFAULT: 5, "3 steps": 3, "4 steps": 4, MORE: 8, PLUS: 5}
    counts |= {"every second step": 5 / 2, "every fourth step": 5 / 4}
    in_full = step_flop(run) + counts.get(arm, 5 / 4) * iteration_flop(run)
    if arm in counts:
        return in_full
    if arm == CUBIC:
        return step_flop(run) + 5 * iteration_flop(run, squares=False)
    if arm.endswith("blocks between"):
        return in_full + 5 * 3 / 4 * iteration_flop(run, blocks=BLOCKS)
    return None


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    draw(plan, found)
    first = next(iter(found.values())).best[DEFAULT]
    share = 5 * iteration_flop(first) / step_flop(first)
    cubic = [m.at_equal_tokens(CUBIC) for m in found.values()]
    arms = [arm for arm in next(iter(found.values())).best if arm != DEFAULT]
    tokens = {arm: [m.at_equal_tokens(arm) for m in found.values()] for arm in arms}
    work = {arm: [m.at_equal_work(arm) for m in found.values()] for arm in arms}
    near = [arm for arm, of in tokens.items() if all(abs(d.mean) < SAME for d in of)]
    loses = [arm for arm, of in tokens.items() if all(d.low > 0 for d in of)]
    gains = {arm: of for arm, of in tokens.items() if all(d.high < 0 for d in of)}
    pays = [arm for arm, of in work.items() if all(d and d.high < 0 for d in of)]
    return Section(
        title="Cheaper iterations",
        claim='arXiv:2606.00371: "cubic5", 10 products for 15, ends within 0.001 of '
        "Newton-Schulz at 1 to 4 B parameters. Keller Jordan: five steps are enough. "
        "MuonBP (arXiv:2510.16981): matrices orthogonalized whole only now and then, "
        "and 8 % more tokens a second. Muon+ (arXiv:2602.21545): rows and columns made "
        "even after Newton-Schulz lower the loss from 60 M to 7 B parameters.",
        setting="147,456 matrix parameters, 400 steps of 1,024 bytes, cosine schedule. "
        "The default, `mc.muonclip(learning_rate)`, and one change. Of every arm the "
        "one learning rate is tuned. Work is arithmetic as written, of "
        "the model and of Newton-Schulz without use of symmetry; the default is also "
        f"trained for {LENGTHS[0]:.0%} and {LENGTHS[-1]:.0%} of the steps, and its "
        "loss after an arm's work is interpolated in the logarithm. In every second or "
        "fourth step the momentum is orthogonalized; the others take it as it is, at "
        f"the same norm, or orthogonalize {BLOCKS} blocks of it. Muon+ is scaled to "
        f"the norm that it had before. {SEEDS} seeds.",
        tables=[table(found)],
        parts={
            f"{CUBIC} within {SAME:g} nats": [
                d.low > -SAME and d.high < SAME for d in cubic
            ],
            f"{PLUS}: a lower loss": [
                m.at_equal_tokens(PLUS).high < 0 for m in found.values()
            ],
            f"{MORE} gain nothing": [
                m.at_equal_tokens(MORE).low > -SAME for m in found.values()
            ],
        },
        figure="cheaper_iterations.png",
        remarks=f"Five steps are {share:.0%} of the model's arithmetic here, and 0.5 "
        "to 2 % at scale: there a loss at equal work is nearly that at equal tokens.",
        answer=f"Little. These end within {SAME:g} nats of five steps of Keller's, at "
        f"equal tokens and on every text: {'; '.join(near) or 'nothing'} (`cubic5`: "
        f"{said(cubic)} on {', '.join(found)}). These end higher, beyond the interval: "
        f"{'; '.join(loses) or 'nothing'}. These end lower: "
        + ("; ".join(f"{a} ({said(of)})" for a, of in gains.items()) or "nothing")
        + f". At equal arithmetic, {share:.0%} of it in Newton-Schulz, these end "
        f"lower: {', '.join(pays) or 'nothing'}. Muon+ makes rows and columns even "
        'after the iteration; `mc.NewtonSchulz(preconditioning="equilibrated")` makes '
        "them even before it.",
        limits="Longer runs; wide matrices, whose spectra need more steps; "
        "iterations that a mesh makes cheaper.",
    )


def said(differences: list[Interval]) -> str:
    return ", ".join(d.show("+.3f") for d in differences)


def measured(lab: Lab, plan: Plan) -> dict[str, Measured]:
    best = {corpus: walk(lab, plan, corpus) for corpus in plan.all_corpora}
    lengths = {}
    for corpus, of in best.items():
        steps = [round(share * of[DEFAULT].steps) for share in LENGTHS]
        lengths[corpus] = {n: of[DEFAULT].but(steps=n) for n in steps}
    both = {corpus: best[corpus] | lengths[corpus] for corpus in best}
    return {
        corpus: Measured(
            best[corpus],
            {arm: trained.losses(arm) for arm in best[corpus]},
            {steps: trained.losses(steps) for steps in lengths[corpus]},
        )
        for corpus, trained in train(lab, plan, both, SEEDS).items()
    }


def walk(lab: Lab, plan: Plan, corpus: str) -> dict[str, Run]:
    best: dict[str, Run] = {}
    for arm in CLAIMED if plan.quick else ARMS:
        start = best.get(DEFAULT) or plan.run(
            corpus, **START[ONE_RATE] | MODEL | RISING | HEADS
        )
        start = start.but(**ARMS[arm])
        best[arm] = tuned(lab, start, ("learning_rate",), one_rate=True)
    return best


def table(found: dict[str, Measured]) -> Table:
    entries = []
    for arm in next(iter(found.values())).best:
        for corpus, m in found.items():
            work, run = flop(m.best[arm], arm), m.best[arm]
            of_default = flop(run, DEFAULT)
            at_work = m.at_equal_work(arm)
            entries.append(
                [
                    arm,
                    corpus,
                    "-" if not (work and of_default) else f"{work / of_default:.1%}",
                    interval(m.losses[arm]).show(),
                    m.at_equal_tokens(arm).difference(),
                    "-" if at_work is None else at_work.difference(),
                    f"{run.learning_rate:.2g}",
                ]
            )
    columns = ["", "corpus", "arithmetic of a step", "loss", "over the default's"]
    columns += ["over the default's at equal work", "rate"]
    caption = "Losses in nats per byte; negative is better than the default."
    return Table(columns, entries, caption)


def draw(plan: Plan, found: dict[str, Measured]) -> None:
    file, label = plan.figures / "cheaper_iterations.png", "nats per byte over 5 steps"
    with panels(file, list(found), xlabel=label) as axes:
        for i, (one, m) in enumerate(zip(axes, found.values(), strict=True)):
            arms = [arm for arm in m.best if arm != DEFAULT]
            tokens = {arm: m.at_equal_tokens(arm) for arm in arms}
            nowhere = Interval(float("nan"), float("nan"))
            work = {arm: m.at_equal_work(arm) or nowhere for arm in arms}
            rows(one, tokens, color=CYCLE[1], label="at equal tokens")
            rows(one, work, color=CYCLE[0], label="at equal arithmetic", shift=-0.25)
            around_zero(one)
            one.tick_params(labelleft=i % 2 == 0)  # the left one of two in a row

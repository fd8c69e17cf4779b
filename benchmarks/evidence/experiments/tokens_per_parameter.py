"""Whether Muon's saving lasts: the share of tokens by a model's size and its tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from pictures import panels
from tables import Table

from ..intervals import Interval, interval
from ..lab import Lab
from ..plan import Plan
from ..recipe import ADAMW_BETA, HEADS, START
from ..run import Run
from ..section import Section
from ..style import CYCLE
from ..tokens import measure, Outcome
from ..tuning import AXES, Pair, tuned
from .defaults import RISING
from .rate_rule import RULE, rule


SEEDS = 3  # of every size, which the fit is over
WHOLE, BELOW = (1.0,), (0.35, 0.5, 0.7, 1.0)
OF_ADAMW = (*AXES, "beta", "b2")  # what its walks tune


class Size(NamedTuple):
    """A model, its lengths in steps, and the shares of each that Muon is trained for.

    Lengths that double are one another's shares; below the first there are others.
    """

    settings: dict[str, Any]
    lengths: Mapping[int, Sequence[float]]
    start: Mapping[str, Any]  # of AdamW's walk at the first of the lengths
    seeds: int = SEEDS
    rounds: int | None = None  # of that walk: to the end, or fewer
    again: Sequence[str] = OF_ADAMW  # what every later length tunes anew
    rates: Sequence[int] | None = None  # lengths that tune Muon's rate: all, or these


SIZES = {
    "24,576": Size(
        dict(layers=2, width=32, heads=2),
        {30: BELOW} | dict.fromkeys((60, 120, 240, 480, 960, 1920), WHOLE),
        START[ADAMW_BETA] | dict(b2=0.95),
        seeds=5,
    ),
    "147,456": Size(
        dict(layers=3, width=64, heads=4),
        {45: BELOW} | dict.fromkeys((90, 180, 360, 720), WHOLE),
        START[ADAMW_BETA] | dict(b2=0.95),
        seeds=5,
    ),
    "3,145,728": Size(
        dict(layers=4, width=256, heads=4),
        {400: (0.4, 0.55, 0.7, 1.0), 800: (0.7, 1.0), 1600: (0.7,)},
        # As the smaller ones, but for the rate, which falls with the width.
        dict(learning_rate=2e-3, weight_decay=0.1, beta=0.7, b2=0.95),
        rounds=1,  # of nine runs of three minutes
        again=AXES,  # of five runs of six minutes, then of twelve
        rates=(400,),
    ),
}
GOAL, RULED, TUNED = "AdamW", "the rule's rate", "rate tuned"
MOONLIGHT, WEN = 0.52, {"0.1 B": 1 / 1.4, "1.2 B": 1 / 1.1}
CHINCHILLA = 20  # tokens for each parameter


class Measured(NamedTuple):
    """One model on one text for one length."""

    outcomes: dict[str, Outcome]  # by how Muon's rate was chosen

    @property
    def adamw(self) -> Run:
        return self.outcomes[RULED].pair.adamw

    @property
    def tokens(self) -> float:
        """For each parameter in matrices."""
        return self.adamw.tokens / self.adamw.matrix_parameters

    @property
    def shares(self) -> list[float]:
        """Of AdamW's tokens, seed by seed, or the longest that was not enough."""
        outcome = self.outcomes[RULED]
        longest = outcome.muon[0][-1][0]
        return [longest if math.isnan(x) else x for x in outcome.shares]


Found = dict[str, dict[str, list[Measured]]]  # by size and corpus, the shortest first


class Law(NamedTuple):
    """Share = `level` * tokens for each parameter ^ `length` * parameters ^ `size`.

    Fitted for each text and seed; the interval is that over these fits.
    """

    fits: np.ndarray  # (texts and seeds, 3), the first one in the logarithm

    @property
    def length(self) -> Interval:
        return interval(self.fits[:, 1])

    @property
    def size(self) -> Interval:
        return interval(self.fits[:, 2])

    def at(self, tokens: float, size: float) -> float:
        """A share, the geometric mean over the fits."""
        return math.exp((self.fits @ [1, math.log(tokens), math.log(size)]).mean())


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    (smallest, of_smallest), *_, (largest, of_largest) = found.items()
    first, *_, last = next(iter(of_smallest.values()))
    lengths = next(iter(of_largest.values()))
    of_lengths = [
        f"{said(of_largest, i)} after {one.adamw.steps:,} steps"
        for i, one in enumerate(lengths)
    ]
    every = [one for of_size in found.values() for of in of_size.values() for one in of]
    law = fitted(every)
    draw(plan, found, law)
    return Section(
        title="Tokens for each parameter",
        claim="Moonlight (arXiv:2502.16982): AdamW's loss with 52 % of its compute, at "
        "about 20 tokens a parameter. Wen et al. (arXiv:2509.02046): 1.4 times fewer "
        "tokens at 0.1 B parameters, 1.1 times at 1.2 B, and less beyond four times "
        "Chinchilla's length. Marin: 1.33 times at 2e17 FLOP, 1.19 times at 3e19, by "
        "its fit a tie at 1e21.",
        setting="Steps of 1,024 bytes, cosine schedule, three sizes. At every length "
        "AdamW's rate, decay, b1 and b2 are tuned by a walk that begins where the "
        "length before ended. The largest model has b1 and b2 tuned at the first "
        "length alone. Its first walk is one round, the best of a place and its "
        "neighbors. `mc.muonclip(learning_rate)`, without a clip, has "
        f"one rate for all parameters: {RULE}, or the best of a walk (for the largest "
        "model at the first length alone); the rest is the default. Muon's shares of a "
        "length are its other lengths, each with a schedule and a rate of its own, "
        "interpolated in the logarithm. Seeds: "
        f"{', '.join(str(size.seeds) for size in SIZES.values())}.",
        tables=[table(every)],
        parts={
            f"Moonlight's {MOONLIGHT:.0%} at {CHINCHILLA} tokens a parameter": [
                interval(one.shares).low <= MOONLIGHT
                for one in every
                if round(one.tokens) == CHINCHILLA
            ],
            "Wen et al.: larger models save less": [law.size.low > 0],
            "Wen et al.: longer training saves less": [law.length.low > 0],
        },
        figure="tokens_per_parameter.png",
        remarks="All by the rule's rate. The first part counts as reproduced "
        "if the interval reaches down to the claim; the others if the share grows with "
        "the size or the length beyond the interval of the fit, a power "
        f"{law.size.show()} of the parameters and {law.length.show()} of the tokens "
        "for each. A share that no run was long enough for counts as the longest. "
        "Between lengths a factor of 2 apart the interpolation makes shares up to 2 % "
        "larger.",
        answer="`mc.muonclip(rate)`, with the rate of the rule below and nothing else "
        "tuned, reaches the loss of a tuned AdamW (rate, decay, b1 and b2) with a "
        f"share of its tokens. In a model of {largest} parameters in matrices "
        f"the share is {'; '.join(of_lengths)}. In a model of "
        f"{smallest} parameters "
        f"{'it saves less' if law.length.low > 0 else 'the saving lasts'} as training "
        f"gets longer: the share is {said(of_smallest, 0)} after {first.adamw.steps} "
        f"steps, {first.tokens:g} tokens a parameter, and {said(of_smallest, -1)} "
        f"after {last.adamw.steps:,}, {last.tokens:g} tokens a parameter. Over all "
        f"runs, the share {trend(law.length)} with more tokens a parameter and "
        f"{trend(law.size)} with larger models.",
        limits="Larger models, where others have found the share nearer to one: 91 % "
        "at 1.2 B parameters (Wen et al.). Longer training of the largest model here, "
        f"which saw {lengths[-1].tokens:.2g} tokens a parameter, or b1 and b2 of its "
        "AdamW tuned anew for each length.",
    )


def said(of_text: Mapping[str, Sequence[Measured]], place: int) -> str:
    """The shares by the rule's rate at one of the lengths, text by text."""
    shares = {c: of[place].outcomes[RULED].show_share() for c, of in of_text.items()}
    return " and ".join(f"{share} ({corpus})" for corpus, share in shares.items())


def trend(power: Interval) -> str:
    if power.low <= 0 <= power.high:
        return "does not change beyond the interval"
    return "grows" if power.low > 0 else "falls"


def measured(lab: Lab, plan: Plan) -> Found:
    found: Found = {}
    for size in list(SIZES)[: 2 if plan.quick else None]:
        for corpus in plan.corpora:
            ends = walks(lab, plan, corpus, size)
            runs = {how: path(size, ends, how) for how in (RULED, TUNED)}
            found.setdefault(size, {})[corpus] = [
                Measured(
                    {
                        how: measure(
                            lab,
                            plan,
                            Pair(of[GOAL], of[how]),
                            of_how,
                            SIZES[size].seeds,
                        )
                        for how, of_how in runs.items()
                        if how in of
                    }
                )
                for of in ends.values()
            ]
    return found


def walks(lab: Lab, plan: Plan, corpus: str, size: str) -> dict[int, dict[str, Run]]:
    """For every number of steps AdamW, and Muon at both rates."""
    of, ends = SIZES[size], {}
    adamw = plan.run(corpus, optimizer="adamw", **of.settings, **of.start)
    axes, rounds = OF_ADAMW, of.rounds
    for steps in plan.some(list(of.lengths)):
        adamw = adamw.but(steps=plan.run(corpus, steps=steps).steps)
        adamw = tuned(lab, adamw, plan.axes(axes), rounds=rounds)
        tunes = of.rates is None or steps in of.rates
        ends[steps] = {GOAL: adamw} | by_rates(lab, adamw, tunes)
        axes, rounds = of.again, None
    return ends


def by_rates(lab: Lab, adamw: Run, tunes: bool) -> dict[str, Run]:
    """`mc.muonclip` of the model that AdamW was tuned for."""
    rate = rule(adamw.learning_rate)
    changes = RISING | HEADS | dict(optimizer="muon", b2=None, weight_decay=0.1)
    ruled = adamw.but(**changes, learning_rate=rate, adam_learning_rate=rate)
    if not tunes:
        return {RULED: ruled}
    return {RULED: ruled, TUNED: tuned(lab, ruled, ("learning_rate",), one_rate=True)}


def path(size: str, ends: Mapping[int, Mapping[str, Run]], how: str) -> list[Run]:
    """Muon's runs of every length, the shortest first."""
    runs = {
        round(share * of[how].steps): of[how]
        for steps, of in ends.items()
        if how in of
        for share in SIZES[size].lengths[steps]
    }
    return [runs[steps].but(steps=steps) for steps in sorted(runs)]


def fitted(every: Sequence[Measured]) -> Law:
    logs: dict[tuple[str, int], list[list[float]]] = {}
    for one in every:
        known = [1.0, math.log(one.tokens), math.log(one.adamw.matrix_parameters)]
        for seed, share in enumerate(one.shares[:SEEDS]):
            of_seed = logs.setdefault((one.adamw.corpus, seed), [])
            of_seed.append([*known, math.log(share)])
    points = map(np.array, logs.values())
    return Law(np.array([np.linalg.lstsq(x[:, :3], x[:, 3])[0] for x in points]))


def table(every: Sequence[Measured]) -> Table:
    columns = ["corpus", "matrix parameters", "steps", "tokens a parameter"]
    columns += ["AdamW: rate, decay, b1, b2", "its loss", "Muon's rate", "the rule's"]
    columns += [f"tokens over AdamW's, {RULED}", TUNED]
    entries = []
    for one in every:
        best, of = one.adamw, one.outcomes
        tuned_of_it = (best.learning_rate, best.weight_decay, best.beta, best.b2)
        tuned_rate = of[TUNED].pair.muon.learning_rate if TUNED in of else None
        entries.append(
            [
                best.corpus,
                f"{best.matrix_parameters:,}",
                f"{best.steps:,}",
                f"{one.tokens:.3g}",
                ", ".join(f"{x:.2g}" for x in tuned_of_it if x is not None),
                interval(of[RULED].adamw).show(),
                f"{tuned_rate:.2g}" if tuned_rate else "-",
                f"{of[RULED].pair.muon.learning_rate:.2g}",
                *(of[how].show_share() if how in of else "-" for how in (RULED, TUNED)),
            ]
        )
    return Table(columns, entries, "Losses in nats per byte, ± the 95 % interval.")


def draw(plan: Plan, found: Found, law: Law) -> None:
    """Shares by the rule's rate and their intervals, by the tuned one, and the fit."""
    file, y = plan.figures / "tokens_per_parameter.png", "tokens, % of a tuned AdamW's"
    x = "tokens for each parameter in matrices"
    with panels(file, plan.corpora, xlabel=x, ylabel=y) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=True):
            for (size, of_size), color in zip(found.items(), CYCLE, strict=False):
                of = of_size[corpus]
                tokens, count = [m.tokens for m in of], of[0].adamw.matrix_parameters
                means, halves = zip(*(interval(m.shares) for m in of), strict=True)
                shares = 100 * np.array([means, np.nan_to_num(halves)])
                style = dict(color=color, label=f"{size} parameters")
                one.errorbar(tokens, *shares, fmt="o", **style)
                tuned_ones = [m for m in of if TUNED in m.outcomes]
                one.plot(
                    [m.tokens for m in tuned_ones],
                    [100 * m.outcomes[TUNED].share.mean for m in tuned_ones],
                    "x",
                    color=color,
                )
                fit = [100 * law.at(x, count) for x in tokens]
                one.plot(tokens, fit, color=color, linewidth=1.0)
            one.plot([], [], "x", color="black", label=TUNED)
            one.plot([], [], color="black", linewidth=1.0, label="the fit")
            draw_claims(one)


def draw_claims(axes: Axes) -> None:
    axes.axhline(100, color="black", linewidth=0.8)
    claims = {f"Wen, {size}": share for size, share in WEN.items()}
    for name, share in {"Moonlight": MOONLIGHT, **claims}.items():
        axes.axhline(100 * share, color="black", linewidth=0.8, linestyle=":")
        place = axes.get_yaxis_transform()
        # Right of the axes, where no point is.
        axes.text(1.01, 100 * share, name, transform=place, va="center", fontsize=9.5)
    axes.set_xscale("log")

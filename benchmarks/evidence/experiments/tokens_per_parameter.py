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
from ..tokens import measure, Outcome, reported
from ..tuning import AXES, Pair, tuned
from .defaults import RISING
from .rate_rule import RULE, rule


SEEDS = 3
WHOLE, BELOW = (1.0,), (0.35, 0.5, 0.7, 1.0)


class Size(NamedTuple):
    """A model, its lengths in steps, and the shares of each that Muon is trained for.

    Lengths that double are one another's shares; below the first there are others.
    """

    settings: dict[str, Any]
    lengths: Mapping[int, Sequence[float]]


# The 400 steps of the largest are those of the experiment on defaults.
SIZES = {
    "24,576": Size(
        dict(layers=2, width=32, heads=2),
        {30: BELOW} | dict.fromkeys((60, 120, 240, 480, 960, 1920), WHOLE),
    ),
    "147,456": Size(
        dict(layers=3, width=64, heads=4),
        {45: BELOW} | dict.fromkeys((90, 180, 360, 720, 1440, 2880), WHOLE),
    ),
    "3,145,728": Size(
        dict(layers=4, width=256, heads=4),
        {100: (0.4, 0.55, 0.7), 400: (0.4, 0.55, 0.7)},
    ),
}
ADAMW = START[ADAMW_BETA] | dict(optimizer="adamw", b2=0.95)  # where its walks begin
GOAL, RULED, TUNED = "AdamW", "the rule's rate", "rate tuned"
MOONLIGHT, WEN = 0.52, {"0.1 B": 1 / 1.4, "1.2 B": 1 / 1.1}
CHINCHILLA = 20  # tokens for each parameter
EXAMPLE = 1.2e9  # parameters, of the largest model of Wen et al.

Key = tuple[str, str, int]  # corpus, size, steps


class Measured(NamedTuple):
    """One model on one text for one length."""

    outcomes: dict[str, Outcome]  # by how Muon's rate was chosen
    peak: float  # the largest attention logit of Muon's runs

    @property
    def adamw(self) -> Run:
        return self.outcomes[TUNED].pair.adamw

    @property
    def tokens(self) -> float:
        """For each parameter in matrices."""
        return self.adamw.tokens / self.adamw.matrix_parameters

    @property
    def shares(self) -> list[float]:
        """Of AdamW's tokens, seed by seed, or the longest that was not enough."""
        outcome = self.outcomes[TUNED]
        longest = outcome.muon[0][-1][0]
        return [longest if math.isnan(x) else x for x in outcome.shares]


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

    def at(self, tokens: float, size: float) -> Interval:
        """The logarithm of a share."""
        return interval(self.fits @ [1, math.log(tokens), math.log(size)])

    def show(self, tokens: float, size: float) -> str:
        of = self.at(tokens, size)
        ends = (math.exp(x) for x in (of.mean, of.low, of.high))
        return "{:.0%} ({:.0%} to {:.0%})".format(*ends)


def experiment(lab: Lab, plan: Plan) -> Section:
    found = measured(lab, plan)
    law = fitted(found)
    draw(plan, found, law)
    near = [m for m in found.values() if 10 < m.tokens < 2 * CHINCHILLA]
    nearest = [m for m in near if abs(m.tokens - CHINCHILLA) < CHINCHILLA / 10]
    sizes = f"from {law.show(CHINCHILLA, 24_576)} with 24,576 parameters in matrices "
    sizes += f"to {law.show(CHINCHILLA, 147_456)} with 147,456"
    lengths = f"from {law.show(1.25, 147_456)} at 1.25 tokens a parameter to "
    lengths += f"{law.show(80, 147_456)} at 80"
    return Section(
        title="Tokens for each parameter",
        claim="Moonlight (arXiv:2502.16982): AdamW's loss with 52 % of its compute, at "
        "about 20 tokens a parameter. Wen et al. (arXiv:2509.02046): 1.4 times fewer "
        "tokens at 0.1 B parameters, 1.1 times at 1.2 B, and less beyond four times "
        "Chinchilla's length. Marin: 1.33 times at 2e17 FLOP, 1.19 times at 3e19, by "
        "its fit a tie at 1e21.",
        setting="Steps of 1,024 bytes, cosine schedule, three sizes. At every length "
        "AdamW's rate, decay, b1 and b2 are tuned by a walk that begins where the "
        "length before ended. `mc.muonclip(learning_rate)` has one rate for both "
        f"sides: {RULE}, or the best of a walk; nothing else of it is tuned. Muon's "
        "shares of a length are its other lengths, each with a schedule and a rate of "
        f"its own, interpolated in the logarithm. {SEEDS} seeds.",
        tables=[table(found)],
        parts={
            f"Moonlight's {MOONLIGHT:.0%} at {CHINCHILLA} tokens a parameter": [
                interval(m.shares).low <= MOONLIGHT for m in nearest
            ],
            "Wen et al.: larger models save less": [law.size.low > 0],
            "Wen et al.: longer training saves less": [law.length.low > 0],
        },
        figure="tokens_per_parameter.png",
        remarks="With the rate tuned. The first part counts as reproduced if the "
        "interval reaches down to the claim; the others if the share grows with the "
        f"size or the length beyond the interval of the fit, a power {law.size.show()} "
        f"of the parameters and {law.length.show()} of the tokens for each. It says "
        f"{law.show(CHINCHILLA, EXAMPLE)} at {EXAMPLE:.1g} parameters, five hundred "
        "times beyond what it was fitted to. A share that no run was long enough for "
        "counts as the longest. Between lengths a factor of 2 apart the interpolation "
        "makes shares up to 2 % larger. Muon's largest logit was "
        f"{max(m.peak for m in found.values()):.0f}: these ran without a clip.",
        answer=f"At {CHINCHILLA} tokens a parameter the fitted share of a tuned "
        f"AdamW's tokens goes {sizes}; with the length it goes {lengths}. "
        f"It {'grows' if law.length.low > 0 else 'does not grow'} with the length "
        f"and {'grows' if law.size.low > 0 else 'does not grow'} with the size beyond "
        "the interval.",
        limits="Models beyond 3 million parameters in matrices, and the largest beyond "
        "0.13 tokens a parameter: what the fit says there is a guess.",
    )


def measured(lab: Lab, plan: Plan) -> dict[Key, Measured]:
    ends: dict[Key, dict[str, Run]] = {}
    for size in list(SIZES)[: 2 if plan.quick else None]:
        for corpus in plan.corpora:
            adamw = plan.run(corpus, **ADAMW | SIZES[size].settings)
            if adamw.width > 64:  # where the best rates are far lower
                adamw = adamw.but(learning_rate=2e-3)
            for steps in plan.some(list(SIZES[size].lengths)):
                adamw = adamw.but(steps=plan.run(corpus, steps=steps).steps)
                adamw = tuned(lab, adamw, plan.axes((*AXES, "beta", "b2")))
                ends[corpus, size, steps] = {GOAL: adamw} | by_rates(lab, adamw)
    paths = {
        (corpus, size, how): path(ends, corpus, size, how)
        for corpus, size, _ in ends
        for how in (RULED, TUNED)
    }
    goals = (of[GOAL] for of in ends.values())
    everything = (*goals, *(run for of_path in paths.values() for run in of_path))
    lab.results(run for end in everything for run in reported(plan, end, SEEDS))
    return {
        (corpus, size, steps): Measured(
            {
                how: measure(
                    lab, plan, Pair(of[GOAL], of[how]), paths[corpus, size, how], SEEDS
                )
                for how in (RULED, TUNED)
            },
            max(
                result["peak"]
                for run in paths[corpus, size, TUNED]
                for result in lab.results(reported(plan, run, SEEDS))
            ),
        )
        for (corpus, size, steps), of in ends.items()
    }


def by_rates(lab: Lab, adamw: Run) -> dict[str, Run]:
    """`mc.muonclip` of the model that AdamW was tuned for."""
    rate = rule(adamw.learning_rate)
    changes = RISING | HEADS | dict(optimizer="muon", b2=None, weight_decay=0.1)
    ruled = adamw.but(**changes, learning_rate=rate, adam_learning_rate=rate)
    return {RULED: ruled, TUNED: tuned(lab, ruled, ("learning_rate",), one_rate=True)}


def path(
    ends: Mapping[Key, Mapping[str, Run]], corpus: str, size: str, how: str
) -> list[Run]:
    """Muon's runs of every length, the shortest first."""
    runs = {
        round(share * of[how].steps): of[how].but(steps=round(share * of[how].steps))
        for key, of in ends.items()
        if key[:2] == (corpus, size)
        for share in SIZES[size].lengths[key[2]]
    }
    return [runs[steps] for steps in sorted(runs)]


def fitted(found: Mapping[Key, Measured]) -> Law:
    logs: dict[tuple[str, int], list[list[float]]] = {}
    for (corpus, _, _), m in found.items():
        known = [1.0, math.log(m.tokens), math.log(m.adamw.matrix_parameters)]
        for seed, share in enumerate(m.shares):
            logs.setdefault((corpus, seed), []).append([*known, math.log(share)])
    points = (np.array(of_seed) for of_seed in logs.values())
    return Law(np.array([np.linalg.lstsq(x[:, :3], x[:, 3])[0] for x in points]))


def table(found: Mapping[Key, Measured]) -> Table:
    columns = ["corpus", "matrix parameters", "steps", "tokens a parameter"]
    columns += ["AdamW: rate, decay, b1, b2", "its loss", "Muon's rate", "the rule's"]
    columns += [f"tokens over AdamW's, {RULED}", TUNED]
    entries = []
    for (corpus, size, steps), m in found.items():
        best = m.adamw
        rates = (best.learning_rate, best.weight_decay, best.beta, best.b2)
        entries.append(
            [
                corpus,
                size,
                f"{steps:,}",
                f"{m.tokens:.2g}",
                ", ".join(f"{x:.2g}" for x in rates if x is not None),
                interval(m.outcomes[TUNED].adamw).show(),
                *(
                    f"{m.outcomes[how].pair.muon.learning_rate:.2g}"
                    for how in (TUNED, RULED)
                ),
                *(m.outcomes[how].show_share() for how in (RULED, TUNED)),
            ]
        )
    return Table(columns, entries, "Losses in nats per byte, ± the 95 % interval.")


def draw(plan: Plan, found: Mapping[Key, Measured], law: Law) -> None:
    file = plan.figures / "tokens_per_parameter.png"
    with panels(
        file,
        plan.corpora,
        xlabel="tokens for each parameter in matrices",
        ylabel="tokens, % of a tuned AdamW's",
    ) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=True):
            for size, color in zip(SIZES, CYCLE, strict=False):
                of = [m for (c, s, _), m in found.items() if (c, s) == (corpus, size)]
                if of:
                    draw_size(one, of, law, color, f"{size} parameters")
            draw_claims(one)


def draw_size(
    axes: Axes, of: Sequence[Measured], law: Law, color: str, label: str
) -> None:
    """Shares with the rate tuned and their intervals, the rule's, and the fit."""
    tokens, count = [m.tokens for m in of], of[0].adamw.matrix_parameters
    means = [interval(m.shares) for m in of]
    axes.errorbar(
        tokens,
        [100 * x.mean for x in means],
        [100 * x.half for x in means],
        fmt="o",
        color=color,
        label=label,
    )
    ruled = [100 * m.outcomes[RULED].share.mean for m in of]
    axes.plot(tokens, ruled, "x", color=color)
    fit = [100 * math.exp(law.at(x, count).mean) for x in tokens]
    axes.plot(tokens, fit, color=color, linewidth=1.0)


def draw_claims(axes: Axes) -> None:
    axes.axhline(100 * MOONLIGHT, color="black", linewidth=0.8, linestyle=":")
    claims = {f"Wen, {size}": share for size, share in WEN.items()}
    for name, share in {"Moonlight": MOONLIGHT, **claims}.items():
        axes.axhline(100 * share, color="black", linewidth=0.8, linestyle=":")
        axes.text(
            0.99,
            100 * share,
            name,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=9,
        )
    axes.axhline(100, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")

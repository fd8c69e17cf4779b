"""How many of AdamW's tokens Muon needs for the same loss."""

import numpy as np
from pictures import panels

from ..intervals import Interval, interval
from ..lab import Lab, losses
from ..plan import Plan
from ..run import Run
from ..section import Section, Table, verdict
from ..style import COLORS, NAMES
from ..tuning import Pair, tuned_pair


SIZES = (
    dict(layers=2, width=32, heads=2),
    dict(layers=3, width=64, heads=4),
    dict(layers=4, width=96, heads=6),
)
SCHEDULES = ("cosine", "constant")
SHARES = (0.35, 0.5, 0.7, 1.0)  # of AdamW's steps, each with a schedule of its own
SEEDS = 3
EVALUATIONS = 10  # of a run with a constant rate, whose every step is an end
TARGET = 0.6


def experiment(lab: Lab, plan: Plan) -> Section:
    cases = tune_all(lab, plan)
    lab.results(run for case in cases.values() for run in reported(plan, case))
    shares = {key: token_shares(lab, plan, case) for key, case in cases.items()}
    rows = [row(lab, plan, key, cases[key], shares[key]) for key in cases]
    columns = ["corpus", "schedule", "matrix parameters", "AdamW: rate, decay"]
    columns += ["Muon: rate, decay", "AdamW's loss", "Muon's loss", "AdamW's tokens"]
    fits = {corpus: fitted(lab, plan, cases, corpus) for corpus in plan.corpora}
    draw(lab, plan, cases, fits)
    largest = [
        interval(shares[corpus, "cosine", len(plan.some(SIZES)) - 1]).mean
        for corpus in plan.corpora
    ]
    return Section(
        title="Token efficiency",
        claim="Moonlight (arXiv:2502.16982): AdamW's loss at 52 % of its compute. "
        "Keller Jordan: 1.35 times fewer tokens (74 %). Wen et al. "
        "(arXiv:2509.02046), against a tuned AdamW of 0.1 B parameters: 1.4 times "
        "(71 %).",
        setting="400 steps of 1,024 bytes. Both optimizers tuned on a grid of "
        "learning rate (factors of 2) and weight decay (factors of 3) until the best "
        "value has neighbours on both sides, by another part of the text and another "
        f"seed than those reported; {SEEDS} seeds. Muon's AdamW side keeps AdamW's "
        "best rate. Under the cosine schedule Muon is also trained for "
        f"{', '.join(f'{s:.0%}' for s in SHARES[:-1])} of the steps, each with a "
        "whole schedule and the rates tuned for all of them; tokens are interpolated "
        "in their logarithm. Under the constant rate they are read off the curve.",
        tables=[
            Table(columns, rows, "Losses in nats per byte, ± the 95 % interval."),
            fit_table(fits),
        ],
        verdict=verdict(share <= TARGET for share in largest),
        figure="token_efficiency.png",
        remarks=f"It counts as reproduced if Muon needs at most {TARGET:.0%} of "
        "AdamW's tokens at the largest size on every corpus, under the cosine "
        "schedule: "
        + ", ".join(
            f"{share:.0%} on {corpus}"
            for share, corpus in zip(largest, plan.corpora, strict=True)
        )
        + ".",
    )


def tune_all(lab: Lab, plan: Plan) -> dict[tuple[str, str, int], Pair]:
    """By corpus, schedule and size."""
    return {
        (corpus, schedule, size): tuned_pair(
            lab, plan, corpus, schedule=schedule, **shape
        )
        for size, shape in enumerate(plan.some(SIZES))
        for corpus in plan.corpora
        for schedule in SCHEDULES
    }


def token_shares(lab: Lab, plan: Plan, case: Pair) -> list[float]:
    """Of AdamW's tokens that Muon needs for its loss, seed by seed; NaN if it fails."""
    goals = losses(lab.results(ends(plan, case.adamw)))
    if case.adamw.schedule == "constant":
        curves = [r["curve"] for r in lab.results(ends(plan, case.muon))]
        paths = [[(s / case.muon.steps, loss) for s, _, loss in c] for c in curves]
    else:
        runs = [[shortened(run, s) for s in SHARES] for run in ends(plan, case.muon)]
        ended = [losses(lab.results(of_seed)) for of_seed in runs]
        paths = [list(zip(SHARES, of_seed, strict=True)) for of_seed in ended]
    return [reached(path, goal) for path, goal in zip(paths, goals, strict=True)]


def reported(plan: Plan, case: Pair) -> list[Run]:
    """All that one case needs beside the tuning."""
    shares = SHARES if case.muon.schedule == "cosine" else (1.0,)
    muon = [shortened(run, s) for run in ends(plan, case.muon) for s in shares]
    return ends(plan, case.adamw) + muon


def ends(plan: Plan, run: Run) -> list[Run]:
    """The runs that are reported."""
    evaluations = EVALUATIONS if run.schedule == "constant" else 1
    return list(plan.over_seeds(run.but(evaluations=evaluations), SEEDS))


def shortened(run: Run, share: float) -> Run:
    return run.but(steps=round(share * run.steps))


def reached(path: list[tuple[float, float]], goal: float) -> float:
    """Where a path of (share, loss) first comes to the goal, between its points."""
    before = path[0]
    if before[1] <= goal:
        return before[0]
    for point in path[1:]:
        if point[1] <= goal:
            part = (before[1] - goal) / (before[1] - point[1])
            return float(before[0] * (point[0] / before[0]) ** part)
        before = point
    return float("nan")


def fitted(lab: Lab, plan: Plan, cases, corpus: str) -> dict[str, tuple[float, float]]:
    """By optimizer, a and b of loss = a C^-b, over the sizes under the cosine."""
    laws = {}
    for side in Pair._fields:
        logs = np.log(scaling(lab, plan, cases, corpus, side))
        slope, level = np.polyfit(logs[:, 0], logs[:, 1], 1)
        laws[side] = (float(np.exp(level)), float(-slope))
    return laws


def scaling(lab: Lab, plan: Plan, cases, corpus: str, side: str) -> np.ndarray:
    """Compute and mean loss by size, `(sizes, 2)`."""
    runs = [
        getattr(case, side)
        for (of, schedule, _), case in cases.items()
        if of == corpus and schedule == "cosine"
    ]
    return np.array([(flops(run), loss(lab, plan, run).mean) for run in runs])


def loss(lab: Lab, plan: Plan, run: Run) -> Interval:
    return interval(losses(lab.results(ends(plan, run))))


def parameters(run: Run) -> int:
    """Those of the hidden matrices."""
    return 12 * run.layers * run.width**2


def flops(run: Run) -> float:
    return 6.0 * parameters(run) * run.tokens


def row(lab: Lab, plan: Plan, key, case: Pair, shares: list[float]) -> list[str]:
    corpus, schedule, _ = key
    settings = [f"{r.learning_rate:.2g}, {r.weight_decay:g}" for r in case]
    ended = [loss(lab, plan, run).show() for run in case]
    share = interval(shares)
    return [
        corpus,
        schedule,
        f"{parameters(case.muon):,}",
        *settings,
        *ended,
        f"{share.mean:.0%} ± {share.half:.0%}",
    ]


def fit_table(fits) -> Table:
    rows = []
    for corpus, laws in fits.items():
        shown = [f"{a:.3g} C^-{b:.4f}" for a, b in laws.values()]
        rows.append([corpus, *shown])
    caption = "Fitted loss against compute C = 6 N D in FLOP, cosine schedule."
    return Table(["corpus", "AdamW", "Muon"], rows, caption)


def draw(lab: Lab, plan: Plan, cases, fits) -> None:
    file = plan.figures / "token_efficiency.png"
    titles = [
        f"{corpus}: {what}" for corpus in plan.corpora for what in ("tokens", "compute")
    ]
    with panels(file, titles, rows=len(plan.corpora)) as axes:
        for i, corpus in enumerate(plan.corpora):
            draw_tokens(
                axes[2 * i],
                lab,
                plan,
                cases[corpus, "cosine", len(plan.some(SIZES)) - 1],
            )
            for side, (a, b) in fits[corpus].items():
                points = scaling(lab, plan, cases, corpus, side)
                axes[2 * i + 1].loglog(
                    *points.T, "o", color=COLORS[side], label=NAMES[side]
                )
                axes[2 * i + 1].loglog(
                    points[:, 0], a * points[:, 0] ** -b, color=COLORS[side]
                )
            axes[2 * i + 1].set(
                xlabel="compute 6 N D, FLOP", ylabel="loss, nats per byte"
            )


def draw_tokens(axes, lab: Lab, plan: Plan, case: Pair) -> None:
    """Muon's loss by its share of the steps, beside AdamW's."""
    adamw = loss(lab, plan, case.adamw)
    axes.axhspan(adamw.low, adamw.high, color=COLORS["adamw"], alpha=0.3, linewidth=0)
    axes.axhline(adamw.mean, color=COLORS["adamw"], label="AdamW, all steps")
    points = []
    for share in SHARES:
        runs = [shortened(run, share) for run in ends(plan, case.muon)]
        points.append(interval(losses(lab.results(runs))))
    mean = [p.mean for p in points]
    x = [share * case.muon.tokens for share in SHARES]
    axes.plot(x, mean, "o-", color=COLORS["muon"], label="Muon, each with its schedule")
    low, high = [p.low for p in points], [p.high for p in points]
    axes.fill_between(x, low, high, color=COLORS["muon"], alpha=0.25, linewidth=0)
    axes.set(xlabel="tokens", ylabel="loss, nats per byte")

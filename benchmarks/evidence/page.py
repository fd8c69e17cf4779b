"""The report's one page: what a user asks, the answer, one figure, and its limits."""

import math
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pictures import panels

from .experiments import (
    candidates,
    cheaper_iterations,
    choices,
    defaults,
    explosion,
    fine_tuning,
    no_harm,
    rate_rule,
    recipes,
    reinforcement,
    stress,
    token_conditions,
    tokens_per_parameter,
)
from .intervals import Interval, interval
from .lab import Lab, Unfinished
from .plan import Plan
from .section import Section
from .style import CYCLE, losses_over, rows


class Answer(NamedTuple):
    """To one question; `experiments` are where it comes from, by name."""

    answer: str
    figure: str
    shown: str  # by the figure, for who cannot see it
    limits: str
    experiments: Sequence[str]


HEAD = """# Muon and MuonClip, measured

Each section answers one question with a figure and states its limits. Every claim,
setting, table and verdict is in [all experiments]({details}). Small transformers on
bytes of source code, prose (six novels) and drama (Shakespeare), on two CPU cores;
AdamW is tuned at least as carefully as Muon. `±` and the bars are 95 % intervals over
seeds, by Student's t, paired by seed where two losses are compared. Losses are in nats
per byte of text that neither training nor tuning saw. Written by
`python benchmarks/reproduce.py` from the runs in `{results}`."""

BEYOND = """## What none of this shows

- **Scale.** The largest model has 3 million parameters in matrices and sees 0.4 million
  bytes. Others have measured larger ones: 1.4 times fewer tokens than a tuned AdamW at
  0.1 B parameters, 1.1 times at 1.2 B (Wen et al., arXiv:2509.02046).
- **Other texts, tokenizers and tasks.** Intervals are those over seeds; the texts and
  the tuned rates stay the same.
- **Accelerators.** Nothing here ran on a GPU or TPU."""


def write_page(
    file: Path,
    details: Path,
    lab: Lab,
    plan: Plan,
    sections: Mapping[str, Section | str],
) -> None:
    """`lab` trains nothing; a question whose runs are missing is said to be open."""
    figures, others = relative(plan.figures, file), relative(details, file)
    parts = [HEAD.format(results=figures, details=others)]
    for question, ask in QUESTIONS.items():
        try:
            found = ask(lab, plan)
        except Unfinished as missing:
            parts.append(f"## {question}\n\nNot finished: {missing}.")
            continue
        links = [
            _link(content, others)
            for name in found.experiments
            if isinstance(content := sections.get(name), Section)
        ]
        commands = " ".join(found.experiments)
        parts += [
            f"## {question}",
            found.answer,
            f"![{found.shown}]({figures}/{found.figure})",
            f"**What this does not show.** {found.limits}",
            f"From {', '.join(links)}: `python benchmarks/reproduce.py {commands}`",
        ]
    write(file, [*parts, _nulls(sections, others), BEYOND])


def anchor(title: str) -> str:
    """A heading's name in a link, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _link(section: Section, details: str) -> str:
    return f"[{section.title}]({details}#{anchor(section.title)})"


def relative(target: Path, file: Path) -> str:
    """The target in a link of the file."""
    return posixpath.relpath(
        target.absolute().as_posix(), file.parent.absolute().as_posix()
    )


def write(file: Path, parts: Sequence[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(part.rstrip() for part in parts) + "\n")


def _nulls(sections: Mapping[str, Section | str], details: str) -> str:
    """Every part of a claim that did not hold anywhere, by experiment."""
    lines = []
    for content in sections.values():
        if isinstance(content, Section):
            never = [name for name, holds in content.parts.items() if not any(holds)]
            if never:
                what = "; ".join(never)
                where = _link(content, details)
                lines.append(f"- {where}: {what}")
    title = "## What did not reproduce, or did not pay"
    return "\n".join(
        [title, "", "We expected these, and found them on no text:", "", *lines]
    )


def rate(lab: Lab, plan: Plan) -> Answer:
    cases = [case for case in rate_rule.cases_of(lab, plan) if case.one_rate]
    if not cases:
        raise Unfinished("no walks of other experiments")
    file = plan.figures / "page_rate.png"
    by_multiple: dict[float, list[float]] = {}
    with panels(
        file, [""], xlabel="rate over the rule's", ylabel="nats over the best rate's"
    ) as (one,):
        for i, case in enumerate(cases):
            rule = rate_rule.rule(case.adamw)
            curve = {r / rule: case.cost(r) for r in sorted(case.tried)}
            one.plot(
                list(curve),
                list(curve.values()),
                color="#999999",
                linewidth=0.8,
                label=None if i else "one text, model and momentum",
            )
            for multiple, cost in curve.items():
                by_multiple.setdefault(multiple, []).append(cost)
        # Where most of the cases were tried, so that the mean is over the same ones.
        shared = sorted(m for m, c in by_multiple.items() if 2 * len(c) > len(cases))
        means = [float(np.mean(by_multiple[m])) for m in shared]
        one.plot(shared, means, "o-", color=CYCLE[0], label="mean")
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter(lambda x, _: f"{Fraction(x)} x")
        one.set_ylim(bottom=0)
    costs, kept = rate_rule.judge(cases, rate_rule.rule)
    half, twice = (_mean_at(by_multiple, multiple) for multiple in (0.5, 2.0))
    return Answer(
        "Set the learning rate to twice that of your tuned AdamW, at most 0.03. Muon's "
        f"and AdamW's parameters share it. In {len(cases)} settings of text, model, "
        "momentum, length and batch (factors of 2, so that the cap is 0.032) this "
        f"costs {np.mean(costs):.3f} nats on average and {max(costs):.3f} at most over "
        "the best rate, and keeps at least "
        f"{rate_rule.KEPT:.0%} of the gain over AdamW in {sum(kept)} of {len(kept)} "
        f"where there is one. Half of it costs {half} nats on average, twice it "
        f"{twice}.",
        "page_rate.png",
        "Loss by the learning rate over the rule's: lowest at the rule's",
        "Rates of models above 3 million parameters; schedules other than cosine and "
        "constant. With 4 sequences AdamW's own rate was better, and in runs of 120 "
        "steps or fewer higher ones.",
        ("rate_rule",),
    )


def _mean_at(costs: Mapping[float, Sequence[float]], multiple: float) -> str:
    near = [v for m, v in costs.items() if math.isclose(m, multiple)]
    return f"{np.mean(near[0]):.3f}" if near else "-"


def stability(lab: Lab, plan: Plan) -> Answer:
    found = stress.measured(lab, plan)
    unheld, corpus = lab.gather(explosion.runs(plan)), plan.corpora[0]
    titles = [
        f"loss spikes in {stress.COUNTED:,} steps",
        f"largest attention logit ({corpus})",
    ]
    with panels(plan.figures / "page_stability.png", titles) as (counts, logits):
        stress.draw_by_rate(counts, found, "spikes")
        for arm, color in zip(("no clip", CLIPPED), CYCLE, strict=False):
            style = dict(color=color, label=arm)
            explosion.draw_course(logits, unheld[corpus, arm], "logits", **style)
        logits.set(xlabel="step", yscale="log")
    most = max(stress.FACTORS)
    spikes = {n: interval(found[n, most].spikes).show(".1f") for n in stress.ARMS}
    clip = stress.difference(found, stress.CLIP, most)
    fewer = "fewer" if clip.high < 0 else "no fewer beyond the interval"
    heights = {
        arm: np.mean([result["peak"] for result in unheld[corpus, arm]])
        for arm in ("no clip", CLIPPED)
    }
    clipped = [
        (explosion.ARMS[arm]["threshold"], results)
        for (_, arm), results in unheld.items()
        if explosion.clips(arm)
    ]
    typical = max(np.mean(explosion.percentiles(of)) / at for at, of in clipped)
    worst = max(max(explosion.peaks(of)) / at for at, of in clipped)
    return Answer(
        "At a high constant rate and without weight decay the largest attention logit "
        f"comes to {heights['no clip']:,.0f} without QK-Clip, and to "
        f"{heights[CLIPPED]:,.0f} with a threshold of 100 ({corpus}). With the clip, "
        f"the 95th percentile is at most {typical:.2g} thresholds, and the largest "
        f"logit of a run at most {worst:.1f}. At {most} times "
        f"the best constant rate, {stress.COUNTED:,} steps have {_listed(spikes)} loss "
        f"spikes. With the clip there are {fewer} than without "
        f"({clip.span('+.1f')}).",
        "page_stability.png",
        "Spikes by optimizer and rate; logits with the clip and without",
        "Whether 15.5 trillion tokens pass without a spike, as Kimi K2 reports: spikes "
        "that come from logits of thousands over weeks do not occur in 1,000 steps of "
        "a model of width 32.",
        ("stress", "explosion"),
    )


CLIPPED = "threshold 100"


def extras(lab: Lab, plan: Plan) -> Answer:
    differences = _extras(lab, plan)
    corpora = list(dict.fromkeys(corpus for corpus, _ in differences))
    names = list(dict.fromkeys(name for _, name in differences))
    label = "nats per byte; negative is better"
    with panels(plan.figures / "page_extras.png", corpora, xlabel=label) as axes:
        for one, corpus in zip(axes, corpora, strict=True):
            means = {
                n: differences[corpus, n] for n in names if (corpus, n) in differences
            }
            losses_over(one, means)
    of_name = {n: [d for (_, m), d in differences.items() if m == n] for n in names}
    pay = [n for n, of in of_name.items() if all(d.high < 0 for d in of)]
    never = [n for n, of in of_name.items() if not any(d.high < 0 for d in of)]
    return Answer(
        "On every text, the loss is lower beyond the interval with: "
        f"{'; '.join(pay)}. It is lower on no text with: {'; '.join(never)}. A `beta` "
        "that rises and a matrix for each head are the default. "
        "`neuron_b2=0.95` is NorMuon, "
        '`orthogonalizer=mc.NewtonSchulz(preconditioning="equilibrated")` is evenness.',
        "page_extras.png",
        "What each addition does to the loss, by text",
        "How additions add up; what they do in larger models, where others have "
        "measured NorMuon.",
        ("defaults", "candidates", "recipes"),
    )


CAUTIOUS = "cautious decay"


def _extras(lab: Lab, plan: Plan) -> dict[tuple[str, str], Interval]:
    """Losses over those without the addition, by text and addition."""
    found: dict[tuple[str, str], Interval] = {}
    smallest, *_ = defaults.MODELS
    for (corpus, size), of in defaults.measured(lab, plan).items():
        for part in defaults.PARTS:
            difference = defaults.gained(of, part) if size == smallest else None
            if difference is not None:
                found[corpus, part] = difference
    for corpus, of in candidates.measured(lab, plan).items():
        for arm in candidates.ALONE:
            if arm in candidates.BASES:
                found[corpus, arm] = candidates.gained(of, arm)
    larger = list(recipes.SIZES)[-1]
    for (corpus, size), of in recipes.measured(lab, plan).items():
        if size == larger:
            found[corpus, CAUTIOUS] = recipes.difference(of, CAUTIOUS)
    return found


def harm(lab: Lab, plan: Plan) -> Answer:
    found = choices.compared(lab, plan)
    clipped = no_harm.compared(no_harm.trained(lab, plan))
    shares = {
        corpus: token_conditions.measure_all(lab, plan, corpus)
        for corpus in plan.corpora
    }
    # With `--quick` not every choice is tried.
    names = [name for name in HARMFUL if (plan.corpora[0], name) in found]
    titles = [f"{corpus}: loss" for corpus in plan.corpora]
    titles += [f"{corpus}: share of AdamW's tokens" for corpus in plan.corpora]
    with panels(plan.figures / "page_harm.png", titles, rows=2) as axes:
        for one, corpus in zip(axes, plan.corpora, strict=False):
            means = {n: found[corpus, n] for n in names}
            means["a clip at a fifth of the logits"] = clipped[corpus, 5.0]
            losses_over(one, means)
            one.set(xlabel="nats per byte over the default")
        for one, corpus in zip(axes[len(plan.corpora) :], plan.corpora, strict=True):
            of = {c: o.share for c, o in shares[corpus].items() if c in CONDITIONS}
            rows(one, of, color=CYCLE[1])
            one.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    small = _listed({c: of["4 sequences"].show_share() for c, of in shares.items()})
    large = _listed(
        {c: of[token_conditions.LARGE_BATCH].show_share() for c, of in shares.items()}
    )
    cost = _listed({c: f"{clipped[c, 5.0].mean:+.2f} nats" for c in plan.corpora})
    worse = [n for n in names if all(found[c, n].low > 0 for c in plan.corpora)]
    return Answer(
        "Tiny batches take most of the saving away: with 4 sequences the share of "
        f"AdamW's tokens is {small}, with 64 it is {large}. A threshold at a fifth of "
        f"the natural logits costs {cost}. These choices are worse beyond the interval "
        f"on every text: {'; '.join(worse)}.",
        "page_harm.png",
        "What makes the loss higher, and on what the share of tokens depends",
        "Harm that takes longer than 400 steps to show.",
        ("choices", "no_harm", "token_conditions"),
    )


HARMFUL = (
    "without Nesterov",
    "query, key and value fused",
    "experts in one matrix",
    "experts by AdamW",
)
CONDITIONS = (
    "4 sequences",
    token_conditions.BASE,
    token_conditions.LARGE_BATCH,
    token_conditions.LONG,
    token_conditions.UNTUNED,
)


def _of(experiment: Any) -> Callable[[Lab, Plan], Answer]:
    """The answer, the figure and the limits of one experiment."""

    def ask(lab: Lab, plan: Plan) -> Answer:
        found: Section = experiment.experiment(lab, plan)
        name = experiment.__name__.rpartition(".")[2]
        return Answer(found.answer, found.figure, found.title, found.limits, (name,))

    return ask


QUESTIONS: Mapping[str, Callable[[Lab, Plan], Answer]] = {
    "How many tokens does it save, and does it last?": _of(tokens_per_parameter),
    "Which learning rate do I set?": rate,
    "How stable is it?": stability,
    "Which extras pay?": extras,
    "What breaks it?": harm,
    "Does it help in fine-tuning?": _of(fine_tuning),
    "Does it help in reinforcement learning?": _of(reinforcement),
    "What does a cheaper iteration cost?": _of(cheaper_iterations),
}


def _listed(of: Mapping[str, Any]) -> str:
    """`45% (code) and 47% (prose)`."""
    *most, last = [f"{value} ({name})" for name, value in of.items()]
    return f"{', '.join(most)} and {last}" if most else last

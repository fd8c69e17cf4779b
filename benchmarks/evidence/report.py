"""Writes the report: one page, and all experiments that are finished."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from tables import Table

from .lab import Lab, Unfinished
from .page import relative, write, write_page
from .plan import Plan
from .section import Section
from .texts import CHECK, CORPORA, text


HEAD = """# Every claim about Muon and MuonClip that was measured

[The report]({page}) answers what a user asks in five minutes; here is all of it.
Written by `python benchmarks/reproduce.py`; every figure comes from the runs in
`{results}`, one JSON line each. `±` is the 95 % interval of a mean over seeds, by
Student's t; differences are paired by seed: the same initial weights and batches.
Losses are in nats per byte, of text that neither training nor tuning saw. All models
are small and trained for minutes: what holds here need not hold at scale, and the other
way round. Intervals are those over seeds: the tuned rates and the texts stay the same.
The rule for the verdict on explosion was changed after its results were known.
"""


def section(name: str, lab: Lab, plan: Plan) -> Section:
    """Trains what is missing, if the lab does."""
    lab.open(name)
    module = importlib.import_module(f"{__package__}.experiments.{name}")
    return module.experiment(lab, plan)


def write_report(
    file: Path, details: Path, names: Sequence[str], lab: Lab, plan: Plan
) -> None:
    """Writes the page to `file`, and every experiment to `details`.

    `lab` trains nothing: what is missing is said to be so.
    """
    sections: dict[str, Section | str] = {}
    for name in names:
        try:
            sections[name] = section(name, lab, plan)
        except Unfinished as missing:
            sections[name] = f"not finished: {missing}"
        except Exception as error:  # one that fails must not take the others along
            sections[name] = f"failed: {error!r}"
    # From where the details are; results may be in another folder.
    folder, page = relative(plan.figures, details), relative(file, details)
    parts = [
        HEAD.format(results=folder, page=page),
        _texts(plan),
        _summary(sections),
        _origin(lab),
    ]
    for name, content in sections.items():
        if isinstance(content, Section):
            command = f"`python benchmarks/reproduce.py {name}`"
            parts.append(content.markdown(folder, command))
    write(details, parts)
    write_page(file, details, lab, plan, sections)


def _summary(sections: dict[str, Section | str]) -> str:
    rows = [
        [content.title, content.verdict, content.summary]
        if isinstance(content, Section)
        else [name, content, ""]
        for name, content in sections.items()
    ]
    columns = ["experiment", "verdict", "part by part of the claim"]
    caption = '"Not everywhere" is not on every corpus, or not in every arm or size.'
    return Table(columns, rows, caption).markdown()


def _texts(plan: Plan) -> str:
    rows = [
        [
            corpus,
            (CORPORA | CHECK).get(corpus, "a file"),
            *(f"{len(part):,}" for part in (source.train, *source.parts.values())),
            source.digest,
        ]
        for corpus, source in ((one, text(one)) for one in plan.all_corpora)
    ]
    columns = ["corpus", "", "bytes to train", "to tune", "to report", "SHA-256"]
    return Table(columns, rows).markdown()


def _origin(lab: Lab) -> str:
    lines = "\n".join(f"- {line}" for line in lab.environments())
    return f"The runs were made with\n\n{lines}"

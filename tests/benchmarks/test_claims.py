"""Every figure on README and home, read against the run that it comes from.

`CLAIMS` has each claim as it is printed, a figure in braces, and for each figure the
table, row and column that it is rounded from: of a file of `benchmarks/results`, or of
a page that has the runs of one, or names their commit. `NOT_MEASURED` has the other
figures.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import ROOT
from tables import kept, Table


PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]


class Figure(NamedTuple):
    """A cell: rows are given by a pattern of how they begin."""

    file: str  # a page, or a file of results and the title of a table
    row: str
    column: str
    change: Callable[[float], float] = lambda x: x
    place: int = 0  # in a cell of several numbers


class Peak(NamedTuple):
    """The largest of the runs of the experiment on explosion, in thresholds."""

    threshold: float


EXPERIMENTS = "benchmarks/evidence/experiments.md"
BENCHMARKS = "benchmarks/README.md"
READINGS = "benchmarks/reading/README.md"
FAST = "accelerator_h100: Fast"
TRAINED = "train_lm: AdamW, Muon and MuonClip"
RULE = "tokens over AdamW's, the rule's rate"
LARGE = "3,145,728"
LENGTHS = (400, 800, 1600)  # steps of the largest model


def half(of: Figure) -> Figure:
    """The number after `±`."""
    return of._replace(place=1)


def tokens(row: str) -> Figure:
    return Figure(EXPERIMENTS, row, RULE)


def saved(row: str) -> Figure:
    return Figure(EXPERIMENTS, row, "Muon's tokens over AdamW's", lambda x: 100 - x)


def percent(of: Figure) -> Figure:
    return of._replace(change=lambda x: 100 * x)


def overhead(row: str) -> Figure:
    return Figure(EXPERIMENTS, row, "MuonClip over AdamW")


def traffic(row: str, change: Callable[[float], float]) -> Figure:
    """The MB after the number of collectives."""
    return Figure(BENCHMARKS, row, "collectives, MB", change, place=1)


CODE, PROSE = (
    [tokens(f"{corpus}; {LARGE}; {steps:,};") for steps in LENGTHS]
    for corpus in ("code", "prose")
)
STEPS = [x._replace(column="steps") for x in CODE]
MATRICES = "GPT-2's 72 matrices, separate against "
MILLION = Figure(EXPERIMENTS, f"code; {LARGE};", "matrix parameters", lambda x: x / 1e6)
THOUSAND = Figure(EXPERIMENTS, "code; 24,576;", "matrix parameters", lambda x: x / 1000)
SHARE = percent(Figure(TRAINED, "Muon;", "share"))
SEEDS = percent(Figure("train_lm: Seeds", "mean;", "share"))
HOLDS = Figure(TRAINED, "MuonClip;", "threshold")

CLAIMS: dict[str, list[Figure | Peak]] = {
    "at step {129} of {300}": [
        Figure(TRAINED, "Muon;", "steps to AdamW's"),
        Figure(TRAINED, "AdamW;", "steps to AdamW's"),
    ],
    "holds the attention logits near {6}": [HOLDS],
    "With {3.1} million matrix parameters": [MILLION],
    "{58} to {61} % of its tokens, after {400}, {800} and {1,600} steps": [
        *(PROSE[0], CODE[0]),
        *STEPS,
    ],
    "With {25} thousand": [THOUSAND],
    "from {85} % (code) and {75} % (prose) after {30} steps": [
        tokens("code; 24,576; 30;"),
        tokens("prose; 24,576; 30;"),
        Figure(EXPERIMENTS, "code; 24,576; 30;", "steps"),
    ],
    "to {58} % and {55} % after {1,920}": [
        tokens("code; 24,576; 1,920;"),
        tokens("prose; 24,576; 1,920;"),
        Figure(EXPERIMENTS, "code; 24,576; 1,920;", "steps"),
    ],
    "in {43} % of its steps": [SHARE],
    "five seeds: {41.3} ± {2.5} %": [SEEDS, SEEDS._replace(column="half")],
    "{7,506} of {7,513} in {175} models of other libraries, none wrong": [
        Figure(READINGS, r"\d+; \d+; 0;", "right"),
        Figure(READINGS, r"\d+; \d+; 0;", "leaves"),
        Figure(READINGS, r"\d+; \d+; 0;", "models"),
    ],
    "{61} ± {2}, {60} ± {4} and {61} ± {2} % (code)": [
        y for x in CODE for y in (x, half(x))
    ],
    "{58} ± {4}, {58} ± {9} and {59} ± {4} % (prose) of the tokens": [
        y for x in PROSE for y in (x, half(x))
    ],
    "of a tuned AdamW after {400}, {800} and {1,600} steps": STEPS,
    "{3.1} million parameters": [MILLION],
    "H100: {8.1} ms, `optax.contrib.muon` {20.5}, `torch.optim.Muon` {38.1}": [
        Figure(FAST, f"{MATRICES}optax;", "ours, ms"),
        Figure(FAST, f"{MATRICES}optax;", "peer, ms"),
        Figure(FAST, f"{MATRICES}torch.*;", "peer, ms"),
    ],
    "{67} MB of traffic per chip, optax {20.3} GB": [
        traffic("Llama-1B, FSDP 64, stacked; ours;", lambda x: x),
        traffic("Llama-1B, FSDP 64, stacked; optax;", lambda x: x / 1000),
    ],
    "95th percentile at most {1.2} times the threshold": [
        Figure(EXPERIMENTS, "code; threshold 30;", "in thresholds")
    ],
    "the largest logit of a run came to {1.9} times": [Peak(30.0)],
    "saves only {15} % (code) and {16} % (prose) of the tokens": [
        saved("code; 4 sequences;"),
        saved("prose; 4 sequences;"),
    ],
    "{64} sequences save {21} % on prose": [
        Figure(EXPERIMENTS, "prose; 64 sequences;", ""),
        saved("prose; 64 sequences;"),
    ],
    "added {124} % to a step's time on a CPU": [overhead("256; 512;")],
    "At width {256} with {512} tokens a step": [
        Figure(EXPERIMENTS, "256; 512;", "width"),
        Figure(EXPERIMENTS, "256; 512;", "tokens a batch"),
    ],
    "with {8,192} tokens {4} %": [
        Figure(EXPERIMENTS, "256; 8,192;", "tokens a batch"),
        overhead("256; 8,192;"),
    ],
}
# Settings, versions, sizes of the models that are compared, and figures of others.
NOT_MEASURED = {
    "of Kimi K2's authors": ["Kimi K2 over 15.5 trillion tokens", "Kimi K2"],
    "of Wen et al., Marin and Moonlight": [
        "91 % at 1.2 billion",
        "Wen et al. (arXiv:2509.02046) find 1.4 times fewer tokens at 0.1 B parameters,"
        " 1.1 times at 1.2 B",
        "a tie at 1e21 FLOP",
        "Moonlight (arXiv:2502.16982) reports half of AdamW's compute at 16 B",
    ],
    "settings": [
        "at most 0.03",
        "is 0.1 unless",
        "default is 1e-4",
        "the threshold (100)",
        "stays below 100",
        "batches of 4 sequences of 64 bytes",
    ],
    "names": ["GPT-2's 72 hidden matrices", "GPT-2", "H100", "Llama-1B on 64 TPU v5p"],
    "of GPT-2": ["three projections of 12 heads"],
    "versions": [
        "Python 3.11 or newer",
        "JAX 0.8.1 to 0.12",
        "Flax 0.12.6 or newer",
        "Optax 0.2.6 or newer except 0.2.7",
        "(0.y)",
        "Apache-2.0",
        "95th",
    ],
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_figure_is_that_of_its_run(claim):
    printed = re.findall(r"\{(.*?)\}", claim)
    for shown, source in zip(printed, CLAIMS[claim], strict=True):
        decimals = len(shown.partition(".")[2])
        assert shown == f"{value(source):,.{decimals}f}"
    text = re.sub("[{}]", "", claim)
    assert any(text in plain(page) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_of_the_page_is_in_the_table(page):
    text = plain(page)
    for claim in sorted(CLAIMS, key=len, reverse=True):
        text = text.replace(re.sub("[{}]", "", claim), "")
    for known in sorted(itertools.chain(*NOT_MEASURED.values()), key=len, reverse=True):
        text = text.replace(known, "")
    text = re.sub(r"`[^`]*`", "", text)
    assert re.findall(r"\S*(?<![a-z])\d\S*(?: \S+){,4}", text) == []


def test_what_the_claims_say_beyond_their_figures():
    shares = [value(x) for x in (*CODE, *PROSE)]
    assert (min(shares), max(shares)) == (value(PROSE[0]), value(CODE[0]))
    assert value(HOLDS._replace(column="last logit")) < 1.2 * value(HOLDS)
    percentiles = [
        number(cell)
        for table in markdown_tables(ROOT / EXPERIMENTS)
        if "in thresholds" in table.columns
        for (cell,) in table.part(".*; threshold", "in thresholds").rows
    ]
    assert len(percentiles) == 4
    assert max(percentiles) == value(
        CLAIMS["95th percentile at most {1.2} times the threshold"][0]
    )


def plain(page: Path) -> str:
    """The text of a page without code, comments, targets of links and emphasis."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|\]\[[^]]*\]|<[^>]*>|\*", "", text)
    return " ".join(text.split())


def value(source: Figure | Peak) -> float:
    if isinstance(source, Peak):
        return max(peaks(source.threshold)) / source.threshold
    return source.change(number(cell(source), source.place))


def cell(source: Figure) -> Any:
    """The cell of the first table that has the row and the column."""
    if not source.file.endswith(".md"):
        tables = [kept(*source.file.split(": "))]
    else:
        tables = list(markdown_tables(ROOT / source.file))
    for table in tables:
        if source.column in table.columns:
            place = list(table.columns).index(source.column)
            for row in table.rows:
                if re.match(source.row, "; ".join(map(str, row))):
                    return row[place]
    raise ValueError(f"no {source}")


def number(cell: str | float, place: int = 0) -> float:
    if not isinstance(cell, str):
        return float(cell)
    return float(re.findall(r"-?\d[\d,]*\.?\d*", cell)[place].replace(",", ""))


def markdown_tables(page: Path) -> Iterator[Table]:
    for block in re.findall(r"(?:^\|.*\|\n)+", page.read_text(), re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in block.splitlines()
        ]
        yield Table(head, [row for row in rows if len(row) == len(head)])


def peaks(threshold: float) -> list[float]:
    file = ROOT / "benchmarks" / "evidence" / "results" / "explosion.jsonl"
    runs = [(json.loads(x["run"]), x["peak"]) for x in map(json.loads, file.open())]
    found = [x for run, x in runs if run.get("threshold", math.inf) == threshold]
    assert len(found) == 6
    return found

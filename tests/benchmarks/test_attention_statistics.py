"""The benchmark of the attention statistic, run small: not its times, but the rest."""

import argparse
import json
import pathlib

import pytest
from attention_statistics import timings
from helpers import run_script


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "attention_statistics.py"
SMALL = ["--layers=1", "--width=8", "--heads=2", "--pairs=2", "--seconds=0"]
LENGTHS = ["--lengths", "512", "1024"]
VARIANTS = ("materialised", "blockwise")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "new" / "figures.json"
    # Enough for every step but those with all logits of the longest.
    limits = ["--memory", "0.02", "--least-pairs", "2"]
    ran = run_script(SCRIPT, *SMALL, *LENGTHS, *limits, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    return ran.stdout, {(row["variant"], row["length"]): row for row in rows}


@pytest.mark.more
def test_every_variant_and_length_has_a_row_in_table_and_file(result):
    printed, rows = result
    assert "commit" in printed and "load" in printed
    assert set(rows) == {(v, n) for v in VARIANTS for n in (512, 1024)}
    for variant, length in rows:
        assert f"| {variant} | {length} |" in printed


@pytest.mark.more
def test_every_row_that_ran_has_its_pairs(result):
    _, rows = result
    ran = [row for row in rows.values() if "ratio" in row]
    assert {row["pairs"] for row in ran} == {2}


class Clocked:
    """A step that takes the times given, and notes when it is its turn."""

    def __init__(self, name, times, turns):
        self.name, self.times, self.turns = name, iter(times), turns

    def start(self):
        pass

    def seconds(self):
        self.turns.append(self.name)
        return next(self.times)


def test_the_ratio_is_the_median_over_the_pairs_that_take_turns():
    turns = []
    without = Clocked("without", [1.0, 2.0, 4.0], turns)
    recording = Clocked("with", [1.1, 2.4, 20.0], turns)
    args = argparse.Namespace(pairs=3, least_pairs=3, seconds=0)
    row = timings(without, recording, args)
    assert turns == ["without", "with", "with", "without", "without", "with"]
    assert row["pairs"] == 3 and row["ratio"] == pytest.approx(1.2)
    assert row["ratio_quartiles"] == pytest.approx([1.15, 3.1])
    assert (row["time_without"], row["time_with"]) == pytest.approx((2000, 2400))


@pytest.mark.more
def test_what_needs_too_much_memory_is_not_run_and_says_so(result):
    printed, rows = result
    skipped = {row for row, figures in rows.items() if "ratio" not in figures}
    assert skipped == {("materialised", 1024)}
    assert printed.count("more than --memory") == 1


@pytest.mark.more
def test_blockwise_memory_grows_with_the_length_and_the_other_with_its_square(result):
    printed, rows = result
    for variant, square in zip(VARIANTS, (True, False), strict=True):
        longer, shorter = rows[variant, 1024], rows[variant, 512]
        factor = longer["memory_with"] / shorter["memory_with"]
        assert (3.5 < factor < 4.2) if square else factor < 2.1
        assert f"512 to 1024 x{factor:.2f}" in printed


@pytest.mark.more
def test_the_statistic_adds_no_memory_to_logits_that_exist_anyway(result):
    _, rows = result
    row = rows["materialised", 1024]
    assert row["memory_with"] < 1.05 * row["memory_without"]

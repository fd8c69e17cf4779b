"""The benchmark of the attention statistic, run small: not its times, but the rest."""

import json
import pathlib

import pytest
from helpers import run_script


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "attention_statistics.py"
SMALL = ["--layers=1", "--width=8", "--heads=2", "--pairs=2", "--seconds=0"]
LENGTHS = ["--lengths", "512", "1024"]
VARIANTS = ("materialised", "blockwise", "residual")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "new" / "figures.json"
    # Enough for every step but those with all logits of the longest.
    limits = ["--memory", "0.02", "--least-pairs", "2"]
    ran = run_script(SCRIPT, *SMALL, *LENGTHS, *limits, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    return ran.stdout, {(row["variant"], row["length"]): row for row in rows}


def test_every_variant_and_length_has_a_row_in_table_and_file(result):
    printed, rows = result
    assert "commit" in printed and "load" in printed
    assert set(rows) == {(v, n) for v in VARIANTS for n in (512, 1024)}
    for variant, length in rows:
        assert f"| {variant} | {length} |" in printed


def test_the_ratio_is_that_of_the_times(result):
    _, rows = result
    row = rows["blockwise", 512]
    low, high = row["ratio_quartiles"]
    assert row["pairs"] == 2 and low <= row["ratio"] <= high
    assert row["time_with"] > 0 and row["time_without"] > 0


def test_what_needs_too_much_memory_is_not_run_and_says_so(result):
    printed, rows = result
    skipped = {row for row, figures in rows.items() if "ratio" not in figures}
    assert skipped == {("materialised", 1024), ("residual", 1024)}
    assert printed.count("more than --memory") == 2


def test_blockwise_memory_grows_with_the_length_and_the_others_with_its_square(result):
    printed, rows = result
    for variant, square in zip(VARIANTS, (True, False, True), strict=True):
        longer, shorter = rows[variant, 1024], rows[variant, 512]
        factor = longer["memory_with"] / shorter["memory_with"]
        assert (3.5 < factor < 4.2) if square else factor < 2.1
        assert f"512 to 1024 x{factor:.2f}" in printed


def test_the_statistic_adds_no_memory_to_logits_that_exist_anyway(result):
    _, rows = result
    row = rows["materialised", 1024]
    assert row["memory_with"] < 1.05 * row["memory_without"]

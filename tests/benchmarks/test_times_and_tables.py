"""The numbers of benchmarks besides times, the cost of recording, and its table."""

import argparse
import json
import time

import attention_statistics
import gpt2
import helpers
import jax
import jax.extend.core
import jax.numpy as jnp
import language_models
import pytest
import tables
import train_lm_in_figures
from alternating import alternate, compare
from attention_statistics import ATTENTIONS, figures
from helpers import ROOT, run_script
from optax_main import RELEASED
from tables import pages, Report, Table, with_tables

import muonclip_jax as mc


def test_ratios_are_of_neighbors():
    times = {"ours": [1.0, 2.0, 10.0], "peer": [2.0, 4.0, 30.0]}
    assert compare(times, "ours", "peer") == (2.0, 4.0, 2.0)
    times["other"] = [1.0, 1.0, 1.0]
    assert compare(times, "ours", "other", "peer") == (2.0, 1.0, 4.0, 0.5, 2.0)
    order = []
    sides = {name: lambda name=name: order.append(name) for name in "ab"}
    assert {k: len(v) for k, v in alternate(sides, 2).items()} == {"a": 2, "b": 2}
    assert "".join(order) == "ab" + "ab" + "ba"


def steps_in_a_trip(jaxpr):
    """Of every loop in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["unroll"]
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from steps_in_a_trip(inner)


@pytest.mark.more
def test_the_main_branch_of_optax_has_a_loop_where_its_release_has_none():
    shapes = {"a": (8, 16), "b": (3, 16, 8)}
    grads, steps, updates = gpt2.gradients(shapes), {}, {}
    for name, tx in gpt2.optimizers(shapes).items():
        state = tx.init(grads)
        traced = jax.jit(tx.update).trace(grads, state, grads)
        steps[name] = list(steps_in_a_trip(traced.jaxpr.jaxpr))
        updates[name], _ = traced.lower().compile()(grads, state, grads)
    # A loop for each leaf, whose trip is one step or all five.
    assert steps["optax"] == [1, 1] and steps[RELEASED] == [5, 5]
    for name, update in updates["optax"].items():
        share = helpers.of_newton_schulz(size=16)
        helpers.assert_close(update, updates[RELEASED][name], share)


def test_tables_come_back_from_the_file(tmp_path, capsys):
    file = tmp_path / "new" / "tables.json"
    report = Report(argparse.Namespace(json=file, repeats=3))
    table = report.table("Times", {"case": "", "seconds": ".2f", "share": ".0%"})
    table.add("first", 1 / 3, 0.5)
    table.add("second", None, 1)
    report.write()
    printed = capsys.readouterr().out
    assert "| first | 0.33 | 50% |\n| second | - | 100% |\n" in printed
    written = json.loads(file.read_text())
    assert written["environment"] == printed.splitlines()[0]
    assert written["arguments"] == {"json": str(file), "repeats": 3}
    (read,) = written["tables"]
    assert read["title"] == "Times" and read["columns"] == {
        "case": "",
        "seconds": ".2f",
        "share": ".0%",
    }
    assert read["rows"] == [["first", 1 / 3, 0.5], ["second", None, 1]]


def test_a_table_as_markdown():
    table = Table(["corpus", ""], [["code", "1"]], "Losses.")
    table.add("prose", None)
    lines = ["Losses.", "", "| corpus |  |", "| --- | --- |"]
    assert table.markdown().splitlines() == [*lines, "| code | 1 |", "| prose | - |"]
    table.add("too", "many", "cells")
    with pytest.raises(ValueError):
        table.markdown()


def test_tables_of_pages_are_those_of_results():
    """`python benchmarks/tables.py` writes them."""
    texts = {page: page.read_text() for page in pages()}
    stale = [page for page, text in texts.items() if with_tables(text) != text]
    assert not stale
    assert sum(text.count("\n<!-- table") for text in texts.values()) > 8


def test_a_page_gets_the_rows_and_columns_that_it_names(tmp_path, monkeypatch):
    columns = {"case": "", "kind": "", "s": ".1f"}
    rows = [["one", "a", 1.04], ["one", "b", 2], ["oneself", "a", None]]
    content = {"tables": [{"title": "Times", "columns": columns, "rows": rows}]}
    (tmp_path / "run.json").write_text(json.dumps(content))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "before\n<!-- table run Times {}-->\nold\n<!-- end of table -->\nafter"

    def shown(options):
        lines = with_tables(page.format(options)).splitlines()
        assert lines[0] == "before" and lines[-2:] == ["<!-- end of table -->", "after"]
        return lines[3:-3]

    assert shown("")[2:] == [
        "| one | a | 1.0 |",
        "| one | b | 2.0 |",
        "| oneself | a | - |",
    ]
    part = shown('rows="one; " columns="s; kind" ')
    assert part == ["| s | kind |", "| --- | --- |", "| 1.0 | a |", "| 2.0 | b |"]
    for options in ('columns="ms" ', 'rows="two" '):
        with pytest.raises(ValueError, match="no column|no row"):
            shown(options)
    with pytest.raises(ValueError, match="no 'Time'"):
        with_tables(page.format("").replace("Times", "Time"))


def test_steps_and_shares_of_the_example_are_those_of_its_runs(tmp_path):
    ends = {"muon": 1.0, "muonclip": 1.5, "adamw": 2.0}
    for name, end in ends.items():
        for seed in (0, 1):
            losses = {150: 3.0 - 0.25 * seed, 300: end}
            history = [
                dict(step=step, validation_loss=x, max_logit=x, clipped=0)
                for step, x in losses.items()
            ]
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            (folder / "results.json").write_text(json.dumps({name: history}))
    file = tmp_path / "figures.json"
    report = Report(argparse.Namespace(json=file))
    train_lm_in_figures.write(report, tmp_path, seeds=2)
    of_first, seeds, curves = json.loads(file.read_text())["tables"]
    # A loss of 2 is half of the way from 3 to 1, and two thirds of that to 1.5.
    assert [row[2:4] for row in of_first["rows"]] == [
        [225, 0.75],
        [250, 5 / 6],
        [300, 1],
    ]
    (*_, half), shares = seeds["rows"][-1], [row[1] for row in seeds["rows"]]
    second = (150 + 150 * 0.75 / 1.75) / 300
    assert shares == pytest.approx([0.75, second, (0.75 + second) / 2])
    assert half == pytest.approx(12.7062 * (0.75 - second) / 2, rel=1e-4)
    assert len(curves["rows"]) == 6


def test_kimi_k2_is_read_from_shapes_within_seconds():
    shapes, loss = language_models.kimi_k2()
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    start = time.process_time()
    reading = mc.read_model(loss, params, tokens)
    assert time.process_time() - start < 10
    assert not reading.unknown and not reading.refused
    labels, numbers = reading.labels["layers"], reading.dimension_numbers["layers"]
    assert labels["router"] == "router" and labels["norm1"] == "vector"
    for name in ("experts_gate", "experts_up", "experts_down"):
        assert tuple(numbers[name]) == (2, 3)
    assert tuple(numbers["q_b"]) == (1, 2)
    assert reading.labels["embed"] == "embedding"
    assert reading.labels["lm_head"] == "head"
    first, layers = reading.attention
    assert (first.path, layers.path) == ("first", "layers")
    assert [leaf.path for leaf in layers.leaves] == ["q_b", "q_b", "kv_b"]
    assert layers.query[0].heads == 64


@pytest.mark.more
@pytest.mark.parametrize("name", ATTENTIONS)
def test_recording_adds_no_memory_and_no_arithmetic_to_speak_of(name):
    shapes, loss = language_models.gpt2(16, 1, 2, 32, 64, ATTENTIONS[name])
    programs, _ = attention_statistics.steps(shapes, loss, 64)
    plans = {k: x.memory_analysis().temp_size_in_bytes for k, x in programs.items()}
    work = {k: x.cost_analysis()["flops"] for k, x in programs.items()}
    assert plans["with"] < plans["without"] * 1.05
    assert work["with"] < work["without"] * 1.05


@pytest.mark.more
def test_blockwise_memory_grows_with_the_length_and_the_other_with_its_square():
    args = argparse.Namespace(layers=1, width=8, heads=2, repeats=1, memory=0.0)
    for name, most, least in (("all logits", 4.2, 3.5), ("blockwise", 2.1, 1.0)):
        shorter, longer = (figures(ATTENTIONS[name], n, args) for n in (512, 1024))
        assert shorter[:3] == [None, None, None]  # more than no memory at all
        assert least < longer[-1] / shorter[-1] < most


@pytest.mark.more
def test_every_attention_and_length_has_a_row(tmp_path):
    file = tmp_path / "new" / "figures.json"
    small = ["--layers=1", "--width=8", "--heads=2", "--repeats=2"]
    script = ROOT / "benchmarks" / "attention_statistics.py"
    run_script(script, *small, "--lengths", "16", "32", "--json", file)
    (table,) = json.loads(file.read_text())["tables"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    found = {(row["attention"], row["length"]) for row in rows}
    assert found == {(name, n) for name in ATTENTIONS for n in (16, 32)}
    assert all(row["with / without"] > 0 for row in rows)

"""What benchmarks compute besides times, and how they print and keep it."""

import argparse
import json

import gpt2
import helpers
import jax
import jax.extend.core
import pytest
from alternating import alternate, compare
from optax_main import RELEASED
from optimizer_step import needed_flops
from tables import Report, Table


def test_needed_flops_are_those_counted_by_hand():
    cube = 2 * 192**3
    square = 5 * 3 * cube  # X X^T, its square, and the product with X, five times
    stack = {"a": (2, 192, 192), "b": (192, 192)}
    assert needed_flops(stack) == pytest.approx(3 * square, rel=0.02)
    # Two passes, each X X^T and Q X. Steps take 4 products of m^3; the first of a pass
    # lacks the one with Q before it, and the last the two for the next X X^T.
    wide = 2 * 2 * (4 * cube) + (3 * 4 - 3 + 2 * 4 - 3) * cube
    assert needed_flops({"c": (768, 192)}) == pytest.approx(wide, rel=0.02)


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
    assert read["title"] == "Times" and read["columns"] == ["case", "seconds", "share"]
    assert read["rows"] == [["first", 1 / 3, 0.5], ["second", None, 1]]


def test_a_table_as_markdown():
    table = Table(["corpus", ""], [["code", "1"]], "Losses.")
    table.add("prose", None)
    lines = ["Losses.", "", "| corpus |  |", "| --- | --- |"]
    assert table.markdown().splitlines() == [*lines, "| code | 1 |", "| prose | - |"]
    table.add("too", "many", "cells")
    with pytest.raises(ValueError):
        table.markdown()

"""What recording costs, run small: not its times, but the rest."""

import argparse
import json
import time

import attention_statistics
import jax
import jax.numpy as jnp
import pytest
from attention_statistics import ATTENTIONS, figures
from helpers import ROOT, run_script
from language_models import gpt2, kimi_k2

import muonclip_jax as mc


def test_kimi_k2_is_read_from_shapes_within_seconds():
    shapes, loss = kimi_k2()
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
    shapes, loss = gpt2(16, 1, 2, 32, 64, ATTENTIONS[name])
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

"""Large models are read from shapes alone; the recorder's cost is measured in small."""

import json
import pathlib
import time

import jax
import jax.numpy as jnp
import pytest
import record_attention
from helpers import run_script

import muonclip_jax as mc


def test_kimi_k2_is_read_from_shapes_within_seconds():
    shapes, loss = record_attention.kimi_k2()
    params = record_attention.made(
        shapes, lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    )
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    start = time.perf_counter()
    reading = mc.read_model(loss, params, tokens)
    assert time.perf_counter() - start < 10
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
def test_steps_without_and_with_the_recorder_are_compared():
    small = {"width": 16, "layers": 1, "heads": 2, "words": 32, "length": 8, "pairs": 2}
    options = [f"--{name}={n}" for name, n in small.items()]
    script = pathlib.Path(record_attention.__file__)
    found = json.loads(run_script(script, *options).stdout)
    assert set(found["seconds"]) == {"without", "recording"}
    memory = found["temporaries_mib"]
    assert memory["recording"] <= memory["without"] * 1.05
    assert found["operations"]["recording"] < found["operations"]["without"] * 1.05

"""Large models are read from shapes alone; the recorder's cost is measured in small."""

import time

import jax
import jax.numpy as jnp
import record_attention

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

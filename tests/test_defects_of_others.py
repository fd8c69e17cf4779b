"""What other implementations got wrong, one test for each, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    as_pure,
    inputs,
    largest,
    linen_stats,
    linen_variables,
    LinenModel,
    nnx_model,
    nnx_stats,
    query_and_key,
)
from layers import latent_layer

import muonclip_jax as mc


def test_negative_logit_next_to_a_firing_head():
    """Megatron-LM: `tau/S` of a negative S, and a NaN from its root (PR #7517)."""
    params = {"attn": query_and_key(3, 4, 2)}
    stats = {"attn": {"max_logits": jnp.asarray([400.0, -5.0, -0.0, 0.0])}}
    after = mc.clip_qk(params, stats)["attn"]["query"]["kernel"][0, :, 0]
    np.testing.assert_array_equal(after, [0.5, 1, 1, 1])


@pytest.mark.parametrize("params_prefix", [False, True])
@pytest.mark.parametrize("stats_prefix", [False, True])
def test_params_prefix(params_prefix, stats_prefix):
    """MaxText: with Linen's outer `params` key nothing matched and nothing happened."""
    params = {"attn": query_and_key(3, 1, 2)}
    stats = {"attn": {"max_logits": jnp.full(1, 400.0)}}
    given = {"params": params} if params_prefix else params
    seen = {"intermediates": stats} if stats_prefix else stats
    after = mc.clip_qk(given, seen)
    after = after["params"] if params_prefix else after
    np.testing.assert_array_equal(after["attn"]["key"]["kernel"], 0.5)


def test_scanned_layers_merged():
    """MaxText: the worst layer of a scan clipped all of them. Its probe, tau 10."""
    params = {"layers": query_and_key(3, 4, 2, 2)}
    rows = jnp.asarray([[20.0, 5.0], [1.0, 1.0], [2.0, 40.0]])
    stats = {"layers": {"max_logits": rows}}
    after = mc.clip_qk(params, stats, 10.0)["layers"]["query"]["kernel"][:, 0, :, 0]
    np.testing.assert_allclose(after, [[0.5**0.5, 1], [1, 1], [1, 0.5]], rtol=1e-6)


def test_micro_batches_summed():
    """MaxText sums [60], [70], [50] over micro-batches to 180; the maximum is 70."""
    params, tx = query_and_key(3, 1, 2), mc.multi_steps(mc.muonclip(0.0), 3)
    state = tx.init(params)
    for s in (60.0, 70.0, 50.0):
        stats = {"max_logits": jnp.asarray([s])}
        _, state = tx.update(params, state, params, attention_stats=stats)
    assert optax.tree.get(state, "max_logit") == 70


def test_missing_statistics_ignored():
    """MaxText: a layer without statistics is skipped in silence."""
    params = {"first": query_and_key(3, 1, 2), "second": query_and_key(3, 1, 2)}
    with pytest.raises(ValueError, match="no statistics.*'second'"):
        mc.clip_qk(params, {"first": {"max_logits": jnp.full(1, 400.0)}})


def test_query_lora_rank_0():
    """MaxText: without query LoRA the query is named `query`, and only keys shrank."""
    params = {
        "query": {"kernel": jnp.ones((3, 1, 4 + 2))},
        "wkv_b": {"kernel": jnp.ones((3, 1, 4 + 3))},
    }
    stats = {"max_logits": jnp.full(1, 400.0)}
    layer = latent_layer("", 4, query="query/kernel")
    after = mc.clip_qk(params, stats, attention=[layer])
    query, key = (after[name]["kernel"][0, 0] for name in params)
    np.testing.assert_array_equal(query, [0.5] * 4 + [0.25] * 2)
    np.testing.assert_array_equal(key, [0.5] * 4 + [1] * 3)


def test_innocent_heads_of_a_group_shrunk():
    """Megatron-LM: the worst head of a group clips its queries and their key."""
    graph, params = nnx.split(nnx_model(kv_heads=2))
    stats = jax.tree.map(
        lambda s: jnp.asarray([400.0, 90.0, 50.0, 60.0]),
        nnx_stats(nnx.merge(graph, params), inputs()),
    )
    after = as_pure(mc.clip_qk(params, stats))["layers"][0]
    before = as_pure(params)["layers"][0]
    np.testing.assert_array_equal(after["key"]["kernel"], before["key"]["kernel"])
    ratio = after["query"]["kernel"] / before["query"]["kernel"]
    np.testing.assert_allclose(ratio[0, :, 0], [0.25, 1, 1, 1], rtol=1e-6)


def test_bias_forgotten():
    """Everyone: Flax's attention has biases, and kernels alone leave S over tau."""

    params = linen_variables(LinenModel(), inputs())["params"]
    stats = linen_stats(LinenModel(), params, inputs())
    tau = float(largest(stats).min() / 2)
    clipped = mc.clip_qk(params, stats, tau)
    after = largest(linen_stats(LinenModel(), clipped, inputs()))
    np.testing.assert_allclose(after, [tau] * 8, rtol=1e-4)

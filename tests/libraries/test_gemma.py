"""QK-Clip and dimension numbers on models of DeepMind's `gemma`."""

import dataclasses
import functools

import clipping
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma import gm
from gemma.gm.math import _positional_embeddings as positional

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 7)))
MODULES = ["layer_0/attn", "layer_1/attn"]
NUMBERS = {
    "embedder/input_embedding": None,
    "scale": None,
    "attn_vec_einsum/w": ((-3, -2), -1),
    "mlp/gating_einsum": (-2, -1),
    "mlp/linear": (-2, -1),
}


@functools.cache
def model_and_params(base, key_heads):
    small = dict(num_embed=23, embed_dim=20, hidden_dim=28, num_heads=4, head_dim=8)
    config = dataclasses.replace(
        getattr(gm.nn, base).config,
        num_kv_heads=key_heads,
        attention_types=getattr(gm.nn, base).config.attention_types[4:6],
        attn_logits_soft_cap=None,
        sliding_window_size=5,
        vision_encoder=None,
        **small,
    )
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return model, clipping.randomize(shapes, scale=3.0)


def logits_of(model, tokens=TOKENS):
    def run(params):
        return model.apply({"params": params}, tokens)

    # `(batch, queries, heads, keys)`
    return clipping.reader(run, MODULES, largest=lambda x: x.max((0, 1, 3)))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_clip(key_heads):
    """Gemma 2 without its cap on logits: one key head, two, and all in one einsum."""
    model, params = model_and_params("Gemma2_2B", key_heads)
    fused = key_heads == 4
    may_change = (
        {"qkv_einsum/w": np.s_[:2]}
        if fused
        else {"/q_einsum/w": ..., "/kv_einsum/w": np.s_[0]}
    )
    clipping.check_clip(params, logits_of(model), mc.named_attention(), may_change)
    inputs = ["qkv_einsum/w"] if fused else ["q_einsum/w", "kv_einsum/w"]
    clipping.check_numbers(params, NUMBERS | dict.fromkeys(inputs, (-2, (-3, -1))))


def query_and_key(attention):
    """Its outputs, without the values that are made with the keys."""
    (query,) = attention["q_einsum"]["__call__"]
    ((key, _),) = attention["kv_einsum"]["__call__"]
    return {"query": {"__call__": (query,)}, "key": {"__call__": (key,)}}


def test_captured_statistics():
    """From outside, as the manual says it, they are what enters the softmax."""
    tokens = jnp.maximum(TOKENS, 1)  # 0 is padding, which moves the positions
    model, params = model_and_params("Gemma2_2B", 2)
    _, recorded = model.apply(
        {"params": params}, tokens, capture_intermediates=True, mutable="intermediates"
    )
    projected = {
        name: {"attn": query_and_key(layer["attn"])}
        for name, layer in recorded["intermediates"].items()
        if name.startswith("layer_")
    }

    def rotate(x):
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return positional.apply_rope(
            x, positions, base_frequency=10_000, scale_factor=1.0
        )

    stats = mc.captured_attention_stats(
        projected,
        scale=None,
        is_causal=True,
        transform=lambda query, key: (rotate(query), rotate(key)),
    )
    windowed, whole = (stats[name]["attn"]["max_logits"] for name in sorted(stats))
    seen = logits_of(model, tokens)(params)
    np.testing.assert_allclose(whole, seen["layer_1/attn"], rtol=1e-5)
    assert (windowed >= seen["layer_0/attn"] * (1 - 1e-5)).all()


def test_normalised_query_and_key():
    """Gemma 3's norms store their gain less one, so that no preset can clip them."""
    _, params = model_and_params("Gemma3_4B", 2)
    einsums = dict.fromkeys(["q_einsum/w", "kv_einsum/w"], (-2, (-3, -1)))
    turned = {"mlp/gating_einsum": (-1, -2)}
    clipping.check_numbers(params, NUMBERS | einsums | turned)
    with pytest.raises(
        ValueError, match="normalised after the projection.*_query_norm"
    ):
        mc.qk_clip(attention=mc.named_attention()).init(params)

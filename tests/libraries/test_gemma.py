"""Models of DeepMind's `gemma`, read and clipped as they are."""

import dataclasses
import functools

import clipping
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma import gm
from reading_checks import check_model

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

# No 0, which is padding.
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 23, (2, 7)))
MODULES = ["layer_0/attn", "layer_1/attn"]
NUMBERS = {
    "embedder/input_embedding": None,
    "scale": None,
    "attn_vec_einsum/w": ((-3, -2), -1),
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

    def run(params):
        return model.apply({"params": params}, TOKENS).logits

    return run, clipping.randomize(shapes, scale=3.0)


# `(batch, queries, heads, keys)`
WHERE = {"largest": lambda logits: logits.max((0, 1, 3))}


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_gemma_2(key_heads):
    """Without its cap on logits: one key head, two, and all in one einsum.

    A key that queries share stays, so that only with four heads the keys may change.
    """
    run, params = model_and_params("Gemma2_2B", key_heads)
    fused = key_heads == 4
    may_change = {"qkv_einsum/w": np.s_[:2]} if fused else {"/q_einsum/w": ...}
    # What shares an einsum is a stack: query, key and value, or gate and up.
    heads = (-2, (-3, -1))
    inputs = {"q_einsum/w": heads, "kv_einsum/w": heads}
    numbers = NUMBERS | ({"qkv_einsum/w": heads} if fused else inputs)
    numbers["mlp/gating_einsum"] = (-2, -1)
    # A layer has the path that its leaves have in common.
    modules = [f"{m}/qkv_einsum" for m in MODULES] if fused else MODULES
    check_model(run, params, modules, may_change, numbers, **WHERE)


def test_normalized_query_and_key():
    """Gemma 3's norms store their gain less one, which no factor scales."""
    run, params = model_and_params("Gemma3_4B", 2)

    def loss(params):
        return -jnp.mean(jax.nn.log_softmax(run(params))[..., 0])

    reading = mc.read_model(loss, params)
    assert not reading.attention and reading.refused
    with pytest.raises(ValueError, match="_modules.py"):
        mc.qk_clip(model=reading)

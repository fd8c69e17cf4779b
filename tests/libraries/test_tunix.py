"""QK-Clip and dimension numbers on models of Google's `tunix`."""

import functools
import importlib

import clipping
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

LENGTH = 7
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, LENGTH)))
POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
MASK = jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (2, LENGTH, LENGTH))
MODULES = [f"layers/{i}/attn" for i in range(2)]
SIZES = dict(num_layers=2, embed_dim=20, hidden_dim=28, num_heads=4, num_kv_heads=2)
NUMBERS = {
    "embedder/input_embedding": None,
    "[qkv]_proj/w": (-3, (-2, -1)),
    "o_proj/w": ((-3, -2), -1),
    "(gate|up|down)_proj/kernel": (-2, -1),
    "(input_layernorm|post_attention_layernorm|final_norm)/w": None,
    "lm_head/w": None,
}


@functools.cache
def model_of(family, name):
    module = importlib.import_module(f"tunix.models.{family}.model")
    config = module.ModelConfig(
        **SIZES, head_dim=8, vocab_size=23, rope_theta=10_000, norm_eps=1e-6
    )
    model = nnx.eval_shape(lambda: getattr(module, name)(config, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return graph, clipping.randomize(params, scale=3.0), rest


def logits_of(graph, rest):
    def run(params):
        return nnx.merge(graph, params, rest)(TOKENS, POSITIONS, None, MASK)[0]

    return clipping.reader(run, MODULES)


def test_llama():
    graph, params, rest = model_of("llama3", "Llama3")
    may_change = {"q_proj/w": ..., "k_proj/w": ...}
    find = mc.named_attention()
    clipping.check_clip(params, logits_of(graph, rest), find, may_change)
    clipping.check_numbers(params, NUMBERS)


def test_captured_statistics():
    """From outside, with the rotation said, they are what enters the softmax."""
    graph, params, rest = model_of("llama3", "Llama3")
    module = importlib.import_module("tunix.models.llama3.model")
    model = nnx.merge(graph, params, rest)
    run = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    _, captured = run(TOKENS, POSITIONS, None, MASK)

    def rotate(x):
        return module.apply_rope(x, POSITIONS, head_dim=8)

    stats = mc.captured_attention_stats(
        captured,
        scale=None,
        is_causal=True,
        transform=lambda q, k: (rotate(q), rotate(k)),
    )
    clipping.check_statistics(stats, logits_of(graph, rest)(params))


def test_biases_beside_the_projections():
    graph, params, rest = model_of("qwen2", "Qwen2")
    may_change = dict.fromkeys(["q_proj/w", "k_proj/w", "q_bias", "k_bias"], ...)
    find = mc.named_attention()
    clipping.check_clip(params, logits_of(graph, rest), find, may_change)
    clipping.check_numbers(params, NUMBERS | {"[qkv]_bias": None})


def test_normalised_query_and_key():
    """The gains of the norms are clipped, for all heads by the largest of them."""
    graph, params, rest = model_of("qwen3", "Qwen3")
    clipping.check_numbers(params, NUMBERS | {"[qk]_norm/w": None})
    with pytest.raises(ValueError, match="normalised after the projection.*k_norm"):
        mc.qk_clip(attention=mc.named_attention()).init(params)
    find = mc.normalised_attention(query="q_norm", key="k_norm")
    may_change = {"q_norm/w": ..., "k_norm/w": ...}
    logits = logits_of(graph, rest)
    clipping.check_clip(params, logits, find, may_change, shared=True)


def test_captured_statistics_of_normalised_query_and_key():
    """From the outputs of the norms."""
    graph, params, rest = model_of("qwen3", "Qwen3")
    module = importlib.import_module("tunix.models.qwen3.model")
    model = nnx.merge(graph, params, rest)
    run = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    _, captured = run(TOKENS, POSITIONS, None, MASK)

    def rotate(x):
        return module.apply_rope(x, POSITIONS, head_dim=8)

    stats = mc.captured_attention_stats(
        captured,
        scale=None,
        is_causal=True,
        query="q_norm",
        key="k_norm",
        transform=lambda q, k: (rotate(q), rotate(k)),
    )
    clipping.check_statistics(stats, logits_of(graph, rest)(params))

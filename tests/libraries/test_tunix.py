"""Models of Google's `tunix`, read and clipped as they are."""

import functools
import importlib

import clipping
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reading_checks import check_model


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

    def run(params):
        return nnx.merge(graph, params, rest)(TOKENS, POSITIONS, None, MASK)[0]

    return run, clipping.randomize(params, scale=3.0)


def test_llama():
    """Queries in groups: keys that a group shares stay."""
    check_model(*model_of("llama3", "Llama3"), MODULES, {"q_proj/w": ...}, NUMBERS)


def test_biases_next_to_the_projections():
    may_change = {"q_proj/w": ..., "q_bias": ...}
    numbers = NUMBERS | {"[qkv]_bias": None}
    check_model(*model_of("qwen2", "Qwen2"), MODULES, may_change, numbers)


def test_normalized_query_and_key():
    """The gains of the norms are clipped, for all heads by the largest of them."""
    may_change = {"q_norm/w": ..., "k_norm/w": ...}
    numbers = NUMBERS | {"[qk]_norm/w": None}
    model = model_of("qwen3", "Qwen3")
    check_model(*model, MODULES, may_change, numbers, shared=True)

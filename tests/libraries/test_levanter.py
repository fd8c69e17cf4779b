"""Models of Levanter, of named arrays of Haliax, read and clipped as they are."""

import functools

import clipping
import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.qwen import Qwen3Config
from reading_checks import check_model


pytestmark = pytest.mark.usefixtures("fast_compilation")

LAYERS, LENGTH = 3, 7
TOKENS = np.random.default_rng(0).integers(0, 23, (2, LENGTH))
SIZES = dict(seq_len=LENGTH, hidden_dim=24, num_layers=LAYERS, num_heads=4)
OPTIONS = dict(attn_backend=AttentionBackend.VANILLA, gradient_checkpointing=False)
GROUPS = dict(num_kv_heads=2, intermediate_dim=28)
MODULES = ["transformer/layers/stacked/self_attn"]
NUMBERS = {
    "token_embeddings/weight": None,
    "q_proj/weight": (-1, (-4, -3, -2)),
    "[kv]_proj/weight": (-1, (-3, -2)),
    "o_proj/weight": ((-2, -1), -3),
    "(gate|up|down)_proj/weight": (-1, -2),
    "(input_layernorm|post_attention_layernorm|norm)/weight": None,
    "lm_head/weight": None,
}


def largest(weights):
    """Heads of levanter are named, `heads` or `kv_head` and `q_heads_per_group`."""
    return hax.max(weights, ("batch", "position", "key_position")).array.reshape(-1)


WHERE = {"module": hax.nn, "largest": largest, "stacked": LAYERS}


@functools.cache
def model_of(config_of, **options):
    config = config_of(**SIZES, **OPTIONS, **options)
    vocabulary = hax.Axis("vocab", 23)

    def init(key):
        return config.model_type.init(vocabulary, config, key=key)

    whole = eqx.filter_jit(init)(jax.random.key(0))
    params, static = eqx.partition(whole, eqx.is_inexact_array)
    tokens = hax.named(TOKENS, ("batch", "position"))

    def run(params):
        model = eqx.combine(params, static)
        return model(tokens, attn_mask=AttentionMask.causal()).array

    return run, clipping.randomize(params, scale=3.0)


@pytest.mark.parametrize("bias", [False, True])
def test_llama(bias):
    """Stacked layers, queries in groups: keys that a group shares stay."""
    run, params = model_of(LlamaConfig, use_bias=bias, **GROUPS)
    leaves = ["weight", "bias"] if bias else ["weight"]
    may_change = {f"q_proj/{leaf}": ... for leaf in leaves}
    numbers = NUMBERS | ({".*bias": None} if bias else {})
    check_model(run, params, MODULES, may_change, numbers, **WHERE)


def test_normalized_query_and_key():
    run, params = model_of(Qwen3Config, **GROUPS)
    may_change = {"q_norm/weight": ..., "k_norm/weight": ...}
    numbers = NUMBERS | {"[qk]_norm/weight": None}
    check_model(run, params, MODULES, may_change, numbers, shared=True, **WHERE)


def test_gpt2():
    """One kernel `(features, 3, heads, head_dim)`; its embedding writes."""
    run, params = model_of(Gpt2Config)
    modules = ["transformer/blocks/stacked/attn/c_attn"]
    may_change = {"c_attn/weight": np.s_[:, :, :2], "c_attn/bias": np.s_[:, :2]}
    # Query, key and value are free axes of one product: the outputs of one matrix.
    numbers = {
        "(token|position)_embeddings/weight": None,
        "c_attn/weight": (-4, (-3, -2, -1)),
        "attn/c_proj/weight": ((-3, -2), -1),
        "mlp/(c_fc|c_proj)/weight": (-2, -1),
        "ln_./weight": None,
        ".*bias": None,
    }
    check_model(run, params, modules, may_change, numbers, **WHERE)

"""QK-Clip and dimension numbers on models of Levanter, of named arrays of Haliax."""

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

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

LAYERS, LENGTH = 3, 7
TOKENS = np.random.default_rng(0).integers(0, 23, (2, LENGTH))
SIZES = dict(seq_len=LENGTH, hidden_dim=24, num_layers=LAYERS, num_heads=4)
OPTIONS = dict(attn_backend=AttentionBackend.VANILLA, gradient_checkpointing=False)
GROUPS = dict(num_kv_heads=2, intermediate_dim=28)
MODULE = "transformer/layers/stacked/self_attn"
NUMBERS = {
    "token_embeddings/weight": None,
    "q_proj/weight": (-1, (-4, -3, -2)),
    "[kv]_proj/weight": (-1, (-3, -2)),
    "o_proj/weight": ((-2, -1), -3),
    "(gate|up|down)_proj/weight": (-1, -2),
    "(input_layernorm|post_attention_layernorm|norm)/weight": None,
    "lm_head/weight": None,
}


@functools.cache
def model_of(config_of, **options):
    config = config_of(**SIZES, **OPTIONS, **options)
    vocabulary = hax.Axis("vocab", 23)

    def init(key):
        return config.model_type.init(vocabulary, config, key=key)

    whole = eqx.filter_jit(init)(jax.random.key(0))
    params, static = eqx.partition(whole, eqx.is_inexact_array)
    return static, clipping.randomize(params, scale=3.0)


def largest(weights):
    """Heads of levanter are named, `heads` or `kv_head` and `q_heads_per_group`."""
    return hax.max(weights, ("batch", "position", "key_position")).array.reshape(-1)


def logits_of(static, module):
    tokens = hax.named(TOKENS, ("batch", "position"))

    def run(params):
        model = eqx.combine(params, static)
        return model(tokens, attn_mask=AttentionMask.causal()).array

    where = {"module": hax.nn, "largest": largest, "stacked": LAYERS}
    return clipping.reader(run, [module], **where)


def shown(params, beginning):
    """The path of a leaf in the table, with what stands for the array in it."""
    rows = mc.describe(params).splitlines()
    return next(row.split()[0] for row in rows if row.startswith(beginning))


@pytest.mark.parametrize("bias", [False, True])
def test_llama(bias):
    """Stacked layers, queries in groups."""
    static, params = model_of(LlamaConfig, use_bias=bias, **GROUPS)
    leaves = ["weight", "bias"] if bias else ["weight"]
    may_change = {f"{x}_proj/{leaf}": ... for x in "qk" for leaf in leaves}
    find = mc.named_attention()
    clipping.check_clip(params, logits_of(static, MODULE), find, may_change)
    clipping.check_numbers(params, NUMBERS | ({".*bias": None} if bias else {}))


def test_normalised_query_and_key():
    static, params = model_of(Qwen3Config, **GROUPS)
    clipping.check_numbers(params, NUMBERS | {"[qk]_norm/weight": None})
    with pytest.raises(ValueError, match="normalised after the projection.*k_norm"):
        mc.qk_clip(attention=mc.named_attention()).init(params)
    find = mc.normalised_attention(query="q_norm", key="k_norm")
    may_change = {"q_norm/weight": ..., "k_norm/weight": ...}
    logits = logits_of(static, MODULE)
    clipping.check_clip(params, logits, find, may_change, shared=True)


def test_gpt2_by_hand():
    """One kernel `(features, 3, heads, head_dim)`, which no preset describes."""
    static, params = model_of(Gpt2Config)
    module = "transformer/blocks/stacked/attn"

    def third(i):
        found = (shown(params, f"{module}/c_attn/{x}") for x in ("weight", "bias"))
        part = -3, slice(i, i + 1)
        return tuple(
            mc.HeadLeaf(path.removeprefix(f"{module}/"), ndim, axis=-2, part=part)
            for path, ndim in zip(found, (4, 3), strict=True)
        )

    find = [mc.AttentionLayer(module, query=third(0), key=third(1))]
    may_change = {"c_attn/weight": np.s_[:, :, :2], "c_attn/bias": np.s_[:, :2]}
    clipping.check_clip(params, logits_of(static, module), find, may_change)
    numbers = {
        "(token|position)_embeddings/weight": None,
        "c_attn/weight": (-4, (-3, -2, -1)),
        "attn/c_proj/weight": ((-3, -2), -1),
        "mlp/(c_fc|c_proj)/weight": (-2, -1),
        "ln_./weight": None,
        ".*bias": None,
    }
    clipping.check_numbers(params, numbers)

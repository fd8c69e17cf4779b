"""Models of MaxText, whose layers are scanned, read and clipped as they are.

Layers are a stack on axis 1 of their params, and the logits are read at the entry of
MaxText's own product.
"""

import functools
import pathlib

import clipping
import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import pytest
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.layers import attention_op as op
from maxtext.utils import model_creation_utils as creation
from reading_checks import check_model


pytestmark = pytest.mark.usefixtures("fast_compilation")

LAYERS, LENGTH, NOPE = 3, 8, 8
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, LENGTH)), jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
SIZES = dict(
    vocab_size=23,
    base_emb_dim=32,
    base_mlp_dim=28,
    base_num_decoder_layers=LAYERS,
    base_num_query_heads=4,
    head_dim=8,
    max_target_length=LENGTH,
)
OPTIONS = dict(
    run_name="test",
    base_output_directory="/nowhere",
    enable_checkpointing=False,
    skip_jax_distributed_system=True,
    override_model_config=True,
    attention="dot_product",
    dtype="float32",
    matmul_precision="highest",
)
LATENT = dict(
    decoder_block="deepseek",
    attention_type="mla",
    base_num_kv_heads=4,
    kv_lora_rank=12,
    qk_nope_head_dim=NOPE,
    qk_rope_head_dim=4,
    v_head_dim=8,
    first_num_dense_layers=LAYERS,
)
WHERE = dict(
    stacked=LAYERS,
    module=op.AttentionOp,
    name="compute_local_attention",
    largest=lambda self, weights: weights.max((0, -2, -1)).reshape(-1),
)


@functools.cache
def model_of(**options):
    base = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
    config = pyconfig.initialize(["", str(base)], **SIZES, **OPTIONS, **options)
    device = jax.devices()[:1]
    model = creation.from_config(config, devices=device, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params):
        model = nnx.merge(graph, params, rest, copy=True)
        return model(TOKENS, POSITIONS, jnp.ones_like(TOKENS), enable_dropout=False)

    return run, clipping.randomize(params, scale=3.0)


NUMBERS = {
    "token_embedder/embedding": None,
    "decoder/decoder_norm/scale": None,
    "(dense_)?layers/(pre|post)_self_attention_layer_norm/scale": None,
    "mlp/(wi_0|wi_1|wo)/kernel": (-3, -1),
    "decoder/logits_dense/kernel": None,
}
HEADS = {"(query|key|value)/kernel": (-4, (-2, -1)), "out/kernel": ((-4, -2), -1)}


def test_llama():
    """Queries in groups: keys that a group shares stay."""
    run, params = model_of(decoder_block="llama2", base_num_kv_heads=2)
    modules = ["decoder/layers/self_attention"]
    check_model(run, params, modules, {"query/kernel": ...}, NUMBERS | HEADS, **WHERE)


def test_normalized_query_and_key():
    """Qwen 3: the heads of a layer share the gains."""
    run, params = model_of(decoder_block="qwen3", base_num_kv_heads=2, use_qk_norm=True)
    modules = ["decoder/layers/self_attention"]
    may_change = {"query_norm/scale": ..., "key_norm/scale": ...}
    numbers = NUMBERS | HEADS | {"(query|key)_norm/scale": None}
    check_model(run, params, modules, may_change, numbers, shared=True, **WHERE)


@pytest.mark.parametrize("rank", [0, 16])
def test_latent(rank):
    """DeepSeek, with and without the low rank of queries.

    Of each head's query and key the rotary part has a share of its own: the key's is
    shared, so that the query's part has the whole factor.
    """
    run, params = model_of(q_lora_rank=rank, **LATENT)
    query = "wq_b" if rank else "query"
    may_change = {f"{query}/kernel": ..., "wkv_b/kernel": np.s_[..., :NOPE]}
    numbers = NUMBERS | {
        "out/kernel": HEADS["out/kernel"],
        f"({query}|wkv_b)/kernel": (-4, (-2, -1)),
        "(wq_a|wkv_a)/kernel" if rank else "wkv_a/kernel": (-3, -1),
        "self_attention/.*norm/scale": None,
    }
    modules = ["decoder/dense_layers/self_attention"]
    check_model(run, params, modules, may_change, numbers, **WHERE)

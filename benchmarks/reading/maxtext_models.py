"""MaxText's models, whose layers are scanned, a stack on axis 1 of their params."""

# pyright: reportMissingImports=false

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils as creation

from .models import Built, cross_entropy, Model, tokens


LIBRARIES = ("maxtext", "flax")

LENGTH = 8
IDS = tokens(2, LENGTH, words=23)
POSITIONS = np.broadcast_to(np.arange(LENGTH), IDS.shape)
SIZES: dict[str, Any] = dict(
    run_name="read",
    base_output_directory="/nowhere",
    enable_checkpointing=False,
    skip_jax_distributed_system=True,
    override_model_config=True,
    attention="dot_product",
    dtype="float32",
    matmul_precision="highest",
    vocab_size=23,
    base_emb_dim=32,
    base_mlp_dim=28,
    base_num_decoder_layers=3,
    base_num_query_heads=4,
    base_num_kv_heads=2,
    head_dim=8,
    max_target_length=LENGTH,
)
LATENT = dict(
    decoder_block="deepseek",
    attention_type="mla",
    base_num_kv_heads=4,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    first_num_dense_layers=3,
)
SCANNED = {
    "*": "-",
    "*/self_attention/*/kernel": "isoo",
    "*/self_attention/out/kernel": "isio",
    "*/self_attention/w*_a/kernel": "iso",
    "*/mlp/w*/kernel": "iso",
}
#: Experts are in front of the layers.
EXPERTS = {"*/MoeBlock_0/w*": "ssio", "*/MoeBlock_0/gate/kernel": "-"}


def build(options: dict[str, Any]) -> Built:
    base = Path(str(maxtext.__file__)).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base)], **SIZES | options)
    model = creation.from_config(config, devices=jax.devices()[:1], rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, ids: Any) -> jax.Array:
        model = nnx.merge(graph, params, rest, copy=True)
        ones = jnp.ones_like(ids)
        return cross_entropy(model(ids, POSITIONS, ones, enable_dropout=False))

    return Built(loss, params, (IDS,))


def model(name: str, verdicts: Any = SCANNED, **options: Any) -> Model:
    shares = bool(options.get("use_qk_norm"))
    made = functools.partial(build, options)
    return Model(name, made, verdicts, attention=1, shares_gains=shares)


MODELS = [
    model("Llama 2", decoder_block="llama2"),
    model("Mistral", decoder_block="mistral"),
    model("Qwen 3", decoder_block="qwen3", use_qk_norm=True),
    model("DeepSeek", **LATENT),
    model("DeepSeek, queries of low rank", **LATENT, q_lora_rank=16),
    model(
        "Mixtral",
        SCANNED | EXPERTS,
        decoder_block="mixtral",
        num_experts=4,
        base_moe_mlp_dim=28,
        num_experts_per_tok=2,
        megablox=False,
        sparse_matmul=False,
    ),
]

"""Levanter's models, of named arrays of Haliax; their layers are stacks."""

# pyright: reportMissingImports=false

import dataclasses
import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.gemma import Gemma2Config, GemmaConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.olmo import Olmo2Config
from levanter.models.qwen import Qwen3Config, QwenConfig

from .models import Built, cross_entropy, Model, tokens


LIBRARIES = ("levanter", "haliax", "equinox")

LENGTH = 8
MESH = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
SIZES: dict[str, Any] = dict(seq_len=LENGTH, hidden_dim=32, num_layers=3, num_heads=4)
SIZES |= dict(attn_backend=AttentionBackend.VANILLA, gradient_checkpointing=True)
GROUPED = SIZES | dict(num_kv_heads=2, intermediate_dim=64)
#: A linear layer of Haliax keeps its outputs in front; Levanter's attention has an axis
#: of groups and one of the queries of a group.
STACKED = {
    "*": "-",
    "*/q_proj/weight*": "soooi",
    "*/[kv]_proj/weight*": "sooi",
    "*/o_proj/weight*": "soii",
    "*/gate_proj/weight*": "soi",
    "*/up_proj/weight*": "soi",
    "*/down_proj/weight*": "soi",
}
GPT2 = {
    "*": "-",
    "*/c_attn/weight*": "siooo|ssioo",
    "*/attn/c_proj/weight*": "siio",
    "*/mlp/c_*/weight*": "sio",
}
#: Experts `(expert, features, width)` in a stack of layers.
EXPERTS = {"*/w[123]/weight*": "ssio", "*/gate/weight*": "-"}


def build(make: Any, options: dict[str, Any]) -> Built:
    names = {field.name for field in dataclasses.fields(make)}
    config = make(**{k: v for k, v in options.items() if k in names})
    words = hax.Axis("vocab", 99)

    def init(key: Any) -> Any:
        return config.model_type.init(words, config, key=key)

    whole = eqx.filter_eval_shape(init, jax.random.key(0))
    params, static = eqx.partition(whole, is_float)
    # What else is an array is made anew, from nothing that is random.
    static = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if is_shape(x) else x, static
    )

    def loss(params: Any, ids: Any) -> jax.Array:
        model = eqx.combine(params, static)
        named = hax.named(ids, ("batch", "position"))
        with MESH, hax.axis_mapping({}):  # experts are routed in a `shard_map`
            return cross_entropy(model(named, attn_mask=AttentionMask.causal()).array)

    return Built(loss, params, (tokens(2, LENGTH),))


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def is_float(x: Any) -> bool:
    return is_shape(x) and np.issubdtype(x.dtype, np.floating)


def model(name: str, make: Any, options: Any, verdicts: Any, **about: Any) -> Model:
    return Model(
        name, functools.partial(build, make, options), verdicts, attention=1, **about
    )


MODELS = [
    model("Gpt2", Gpt2Config, SIZES, GPT2),
    model("Llama", LlamaConfig, GROUPED, STACKED),
    model("Llama, biases", LlamaConfig, GROUPED | {"use_bias": True}, STACKED),
    model("Llama, tied", LlamaConfig, GROUPED | {"tie_word_embeddings": True}, STACKED),
    model("Mistral", MistralConfig, GROUPED, STACKED),
    model("Qwen2", QwenConfig, GROUPED, STACKED),
    model("Qwen3", Qwen3Config, GROUPED, STACKED, shares_gains=True),
    # Its norms are over all heads together, with a gain for each entry.
    model("Olmo2", Olmo2Config, GROUPED | {"use_flash_attention": False}, STACKED),
    model("Gemma", GemmaConfig, GROUPED | {"head_dim": 8}, STACKED),
    model("Gemma2", Gemma2Config, GROUPED | {"head_dim": 8}, STACKED, is_capped=True),
    model("Mixtral", MixtralConfig, GROUPED, STACKED | EXPERTS),
]

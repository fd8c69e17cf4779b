"""Google's tunix and DeepMind's gemma, in one environment."""

# pyright: reportMissingImports=false

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from gemma import gm

from .models import Built, cross_entropy, Model, tokens


LIBRARIES = ("google-tunix", "gemma", "flax")

LENGTH = 7
IDS = tokens(2, LENGTH, words=23)
POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH), IDS.shape)
MASK = jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (2, LENGTH, LENGTH))
SIZES = dict(num_layers=2, embed_dim=20, hidden_dim=28, num_heads=4, num_kv_heads=2)
TUNIX = {
    "*": "-",
    "*/[qkv]_proj/w": "ioo",
    "*/o_proj/w": "iio",
    "*/*_proj/kernel": "io",
}
#: Einsums `(heads, features, head_dim)`; what shares one is its outputs, or a matrix
#: each: key and value, gate and up.
GEMMA = {
    "*": "-",
    "*/q_einsum/w": "oio",
    "*/kv_einsum/w": "ooio|soio",
    "*/qkv_einsum/w": "ooio|soio",
    "*/attn_vec_einsum/w": "iio",
    "*/mlp/gating_einsum": "oio|sio",
    "*/mlp/linear": "io",
}
TURNED = GEMMA | {"*/mlp/gating_einsum": "ooi|soi"}


def of_tunix(family: str, name: str, **options: Any) -> Built:
    module = importlib.import_module(f"tunix.models.{family}.model")
    config = module.ModelConfig(
        **SIZES | dict(head_dim=8, vocab_size=23, norm_eps=1e-6, rope_theta=10_000),
        **options,
    )
    model = nnx.eval_shape(lambda: getattr(module, name)(config, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, ids: Any) -> jax.Array:
        model = nnx.merge(graph, params, rest)
        return cross_entropy(model(ids, POSITIONS, None, MASK)[0])

    return Built(loss, params, (IDS,))


def of_gemma(base: str, key_heads: int, **options: Any) -> Built:
    kept = getattr(gm.nn, base).config
    config = dataclasses.replace(
        kept,
        num_embed=23,
        embed_dim=20,
        hidden_dim=28,
        num_heads=4,
        head_dim=8,
        num_kv_heads=key_heads,
        attention_types=kept.attention_types[4:6],
        sliding_window_size=5,
        vision_encoder=None,
        **options,
    )
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), IDS)["params"]

    def loss(params: Any, ids: Any) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, ids).logits)

    return Built(loss, params, (IDS,))


def tunix(label: str, family: str, name: str, **about: Any) -> Model:
    return Model(
        f"tunix, {label}",
        functools.partial(of_tunix, family, name),
        TUNIX,
        attention=2,
        **about,
    )


def gemma(label: str, base: str, key_heads: int, verdicts: Any, **about: Any) -> Model:
    build = functools.partial(of_gemma, base, key_heads)
    return Model(f"gemma, {label}", build, verdicts, **about)


MODELS = [
    tunix("Llama 3", "llama3", "Llama3"),
    tunix("Qwen 2", "qwen2", "Qwen2"),
    tunix("Qwen 3", "qwen3", "Qwen3", shares_gains=True),
    gemma("Gemma 2, one key head", "Gemma2_2B", 1, GEMMA, attention=2, is_capped=True),
    gemma("Gemma 2, in groups", "Gemma2_2B", 2, GEMMA, attention=2, is_capped=True),
    gemma("Gemma 2, one einsum", "Gemma2_2B", 4, GEMMA, attention=2, is_capped=True),
    # Its norms store their gain less one, so that no factor scales the logits.
    gemma("Gemma 3", "Gemma3_4B", 2, TURNED, refused=1),
]

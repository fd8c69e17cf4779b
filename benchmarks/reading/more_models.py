"""penzai's language models, Equimo's pictures, diffusers' diffusion."""

# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Callable
from typing import Any

import diffusers.models.unets.unet_2d_condition_flax as diffusion
import equimo.models as equimo
import jax
import jax.numpy as jnp
import numpy as np
from diffusers.models.vae_flax import FlaxAutoencoderKL
from penzai import pz
from penzai.models.transformer.variants import gpt_neox
from penzai.models.transformer.variants import llamalike_common as llamalike

from .equinox_models import of as of_equinox
from .models import Built, cross_entropy, floats, Model, tokens


LIBRARIES = ("penzai", "equimo", "equinox", "diffusers")

KEY = jax.random.key(0)


def of_penzai(whole: Any) -> Built:
    """Parameters are a dictionary by their labels."""
    skeleton, variables = pz.unbind_params(whole)
    params = {p.label: p.value for p in variables}

    def loss(params: Any, ids: Any) -> jax.Array:
        bound = [
            dataclasses.replace(p.freeze(), value=params[p.label]) for p in variables
        ]
        model = pz.bind_variables(skeleton, bound)
        named = pz.nx.wrap(ids).tag("batch", "seq")
        positions = pz.nx.arange("seq", ids.shape[1])
        out = model(named, token_positions=positions)
        return cross_entropy(out.untag("batch", "seq", "vocabulary").unwrap())

    return Built(loss, params, (tokens(2, 8),))


def llama(**options: Any) -> Any:
    sizes: dict[str, Any] = dict(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=32
    )
    sizes |= dict(projection_dim=8, mlp_hidden_dim=64, num_decoder_blocks=2)
    kind: dict[str, Any] = (
        dict(mlp_variant="swiglu", tie_embedder_and_logits=False) | options
    )
    config = llamalike.LlamalikeTransformerConfig(**sizes, vocab_size=99, **kind)
    return llamalike.build_llamalike_transformer(config, init_base_rng=KEY)


def neox(**options: Any) -> Any:
    config = gpt_neox.GPTNeoXTransformerConfig(
        num_attention_heads=4,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=99,
        activation_fn="gelu_exact",
        rope_subset_size=4,
        rope_wavelength=1e4,
        layernorm_epsilon=1e-5,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
        **options,
    )
    return gpt_neox.build_gpt_neox_transformer(config, init_base_rng=KEY)


def of_equimo(make: Callable[[Any], Any], size: int = 32) -> Built:
    return of_equinox(make, floats(2, 3, size, size), key=KEY, inference=True)


def unet() -> Built:
    """Blocks of two widths, whose heads have two sizes, that look at text."""
    model = diffusion.FlaxUNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=16,
    )
    params = jax.eval_shape(model.init_weights, KEY)

    def loss(params: Any, *args: Any) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, *args).sample)

    times = np.asarray([1.0, 9.0], np.float32)
    return Built(loss, params, (floats(2, 4, 8, 8), times, floats(2, 5, 16)))


def autoencoder() -> Built:
    model = FlaxAutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, 32),
        norm_num_groups=8,
        sample_size=16,
    )
    params = jax.eval_shape(model.init_weights, KEY)

    def loss(params: Any, x: Any) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, x).sample)

    return Built(loss, params, (floats(2, 3, 16, 16),))


#: Named axes, of the inputs before those of the outputs.
PENZAI = {
    "*": "-",
    "*/query*.weights*": "io*",
    "*/key*.weights*": "io*",
    "*/value*.weights*": "io*",
    "*/output*.weights*": "i*o",
    "*/mlp/*.weights*": "io",
}
EQUIMO = {
    "*": "-",
    "*attn/qkv/weight": "oi",
    "*attn/proj/weight": "oi",
    "*/fc?/weight": "oi*",
    "*conv*/weight": "oi*",
    "patch_embed/proj/weight": "oiii|-",
    "conv1/conv/weight": "oiii|-",
    "blocks/0/downsample/conv/weight": "oiii|-",
    "*/dwconv/weight": "-",
    "*/depth_conv/conv/weight": "-",
    "*norm/weight": "-",
}


#: What reads or writes pixels or latents may be a matrix or AdamW's.
DIFFUSERS = {
    "*": "-",
    "*/kernel": "i*o",
    "*conv_in/kernel": "iiio|-",
    "*conv_out/kernel": "-|iiio",
}


def picture(**options: Any) -> Callable[[Any], Any]:
    sizes: dict[str, Any] = dict(img_size=32, in_channels=3, dim=32, patch_size=8)
    sizes |= dict(num_heads=[4], depths=[2], num_classes=10)
    return lambda key: equimo.VisionTransformer(**sizes | options, key=key)


MODELS = [
    Model("penzai, Llama", lambda: of_penzai(llama()), PENZAI, attention=2),
    Model(
        "penzai, Gemma",
        lambda: of_penzai(
            llama(mlp_variant="geglu_approx", tie_embedder_and_logits=True)
        ),
        PENZAI,
        attention=2,
    ),
    Model("penzai, GPT-NeoX", lambda: of_penzai(neox()), PENZAI, attention=2),
    Model(
        "penzai, GPT-NeoX, stacked",
        lambda: of_penzai(neox(use_layer_stack=True)),
        {k: v if v == "-" else f"s{v}" for k, v in PENZAI.items()},
        attention=1,
    ),
    Model("equimo, ViT", lambda: of_equimo(picture()), EQUIMO, attention=2),
    Model(
        "equimo, ViT, normalized query and key",
        lambda: of_equimo(picture(qk_norm=True)),
        EQUIMO,
        attention=2,
        shares_gains=True,
    ),
    Model(
        "equimo, ConvNeXt",
        lambda: of_equimo(
            lambda key: equimo.ConvNeXt(
                3, depths=[1, 1], dims=[8, 16], num_classes=10, key=key
            )
        ),
        EQUIMO,
    ),
    Model(
        "equimo, MobileNetV3",
        lambda: of_equimo(lambda key: equimo.mobilenet.mobilenetv3_small(key=key), 64),
        EQUIMO,
    ),
    Model("diffusers, UNet", unet, DIFFUSERS, attention=8),
    Model("diffusers, autoencoder", autoencoder, DIFFUSERS, attention=2),
]

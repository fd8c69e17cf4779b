"""bonsai's models (NNX), whose folder of a checkout has to be in `PYTHONPATH`.

PyPI has none of it: https://github.com/jax-ml/bonsai, here at 3628425.
"""

# pyright: reportMissingImports=false

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from bonsai.models.convnext import modeling as convnext
from bonsai.models.densenet121 import modeling as densenet
from bonsai.models.dinov3 import modeling as dinov3
from bonsai.models.efficientnet import modeling as efficientnet
from bonsai.models.llada import modeling as llada
from bonsai.models.mamba2 import modeling as mamba2
from bonsai.models.qwen3 import modeling as qwen3
from bonsai.models.resnet import modeling as resnet
from bonsai.models.umt5 import modeling as umt5
from bonsai.models.unet import modeling as unet
from bonsai.models.vae import modeling as vae
from bonsai.models.vgg19 import modeling as vgg19
from bonsai.models.vit import modeling as vit
from bonsai.models.whisper import modeling as whisper
from flax import nnx

from .flax_models import HEADS, of_nnx, plain
from .models import floats, Model, tokens


LIBRARIES = ("bonsai 3628425", "flax")

DENSE = {"*": "-", "*/kernel": "i*o", "*classifier/kernel": "-", "lm_head/kernel": "-"}


def with_keys(model: Any, *args: Any) -> Any:
    return model(*args, rngs=nnx.Rngs(0))


QWEN = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=99,
    emb_dim=32,
    mlp_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    rope_scaling_factor=8.0,
    local_rope_theta=1e4,
    norm_eps=1e-6,
    tie_word_embeddings=True,
)


def with_cache(model: Any, ids: jax.Array) -> Any:
    """Keys and values are written to a cache, and read from it."""
    cache = qwen3.init_cache(QWEN, len(ids), ids.shape[1], 0, jnp.float32)
    return model(ids, cache=cache, segment_ids=jnp.ones_like(ids))


def llada_config() -> Any:
    config = llada.ModelConfig.llada_8b_it(False, False, jnp.float32)
    small = dict(d_model=32, n_heads=4, n_kv_heads=4, n_layers=2, vocab_size=99)
    names = [field.name for field in dataclasses.fields(llada.ShardingConfig)]
    unsharded: Any = llada.ShardingConfig(**dict.fromkeys(names))
    small |= dict(embedding_size=99, mlp_hidden_size=64, shd_cfg=unsharded)
    return dataclasses.replace(config, **small)


def whisper_config() -> Any:
    small = dict(d_model=32, encoder_layers=2, decoder_layers=2, vocab_size=99)
    small |= dict(encoder_attention_heads=4, decoder_attention_heads=4)
    small |= dict(encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=10)
    small |= dict(max_source_positions=8, max_length=16, num_hidden_layers=2)
    return dataclasses.replace(whisper.ModelConfig.whisper_tiny(), **small)


def transcribed(model: Any, sound: jax.Array, ids: jax.Array) -> Any:
    """As its `run_model`: the embedding of tokens writes them, too."""
    encoded = model.encoder(sound)
    hidden = model.decoder(ids, None, encoded, None, decode=False)
    return model.decoder.embed_tokens.attend(hidden)


IMAGE = floats(2, 32, 32, 3)
IDS = tokens(2, 8)


def model(
    name: str,
    make: Any,
    config: Any,
    verdicts: Mapping[str, str] = MappingProxyType({}),
    *,
    call: Callable[..., Any] = plain,
    args: tuple[Any, ...] = (IMAGE,),
    **about: Any,
) -> Model:
    made = functools.partial(of_nnx, lambda rngs: make(config, rngs=rngs), call, *args)
    return Model(name, made, {**DENSE, **verdicts}, **about)


MODELS = [
    model(
        "vit",
        vit.ViTClassificationModel,
        vit.ModelConfig((16, 16), (4, 4), 3, 32, 0.0, 0.0, 4, 64, 1e-6, 2, 10),
        HEADS | {"pos_embeddings/projection/kernel": "iiio|-"},
        call=with_keys,
        args=(floats(2, 16, 16, 3),),
        attention=2,
    ),
    model(
        "dinov3, gated",
        dinov3.Dinov3ViTModel,
        dinov3.ModelConfig(
            patch_size=(4, 4),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            hidden_act="silu",
            use_gated_mlp=True,
        ),
        {"embeddings/patch_embeddings/kernel": "iiio|-"},
        args=(floats(2, 3, 16, 16),),
        attention=2,
        is_exact=False,  # it rotates in bfloat16, so that a clip is that exact
    ),
    model(
        "convnext",
        convnext.ConvNeXt,
        convnext.ModelConfig((1, 2), (16, 32), 0.0, 10),
        {
            "*dwconv/kernel": "-",
            "head/kernel": "-",
            "embedding_layer/layers/0/kernel": "iiio|-",
        },
        call=lambda model, x: model(x, rngs=jax.random.key(0)),
    ),
    model(
        "densenet121",
        densenet.DenseNet,
        densenet.ModelConfig(10, [2, 2], 8),
        {"init_conv/kernel": "iiio|-", "linear/kernel": "-"},
    ),
    model(
        "efficientnet",
        efficientnet.EfficientNet,
        efficientnet.ModelConfig.b0(10),
        {"*depthwise_conv/kernel": "-", "stem_conv/kernel": "iiio|-"},
        tree="bonsai_efficientnet_b0",
    ),
    model(
        "llada",
        llada.LLaDAModel,
        llada_config(),
        {"wte/*": "-", "ff_out/kernel": "-"},
        call=lambda model, ids: model(ids, jnp.ones_like(ids), jax.random.key(0))[0],
        args=(IDS,),
        attention=2,
    ),
    model(
        "mamba2",
        mamba2.Mamba2ForCausalLM,
        mamba2.ModelConfig(
            vocab_size=99,
            hidden_size=32,
            state_size=16,
            head_dim=8,
            chunk_size=4,
            num_hidden_layers=2,
        ),
        {"*/conv1d/*kernel": "-", "*/conv1d/conv/kernel": "-"},
        call=lambda model, ids: model(ids)["logits"],
        args=(IDS,),
        tree="bonsai_mamba2",
    ),
    model(
        "qwen3, with a cache",
        qwen3.Qwen3,
        QWEN,
        {"*/[qkv]_proj/kernel": "ioo", "*/o_proj/kernel": "iio"},
        call=with_cache,
        args=(IDS,),
        attention=2,
        shares_gains=True,
        tree="bonsai_qwen3_0.6b",
    ),
    model(
        "resnet",
        resnet.ResNet,
        resnet.ModelConfig([1, 1, 1, 1], 10),
        {"stem/conv/kernel": "iiio|-", "fc/kernel": "-"},
    ),
    model(
        "umt5",
        umt5.UMT5Model,
        umt5.ModelConfig(
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
        ),
        call=lambda model, ids: model.lm_head(
            model(input_ids=ids, decoder_input_ids=ids)
        ),
        args=(IDS,),
        attention=6,
        is_exact=False,  # tables of relative positions
        tree="bonsai_umt5",
    ),
    model(
        "unet",
        unet.UNet,
        unet.ModelConfig(3, 2, (8, 16, 32, 64, 128)),
        {"inc/conv1/kernel": "iiio|-", "outc/conv/kernel": "-"},
        tree="bonsai_unet",
    ),
    model(
        "vae",
        vae.VAE,
        vae.ModelConfig((8, 16), 4, 4),
        {"encoder/conv_in/kernel": "iiio|-", "decoder/conv_out/kernel": "-|iiio"},
        args=(floats(2, 8, 8, 3),),
        attention=2,
    ),
    model(
        "vgg19",
        vgg19.VGG,
        vgg19.ModelConfig(10, [1, 1, 1, 1, 1], [8, 8, 16, 16, 16, 32]),
        {
            "conv_block0/conv_layers/0/kernel": "iiio|-",
            "classifier/layers/[01]/kernel": "iiio",
            "classifier/layers/3/kernel": "-",
        },
        tree="bonsai_vgg19",
    ),
    model(
        "whisper",
        whisper.Whisper,
        whisper_config(),
        HEADS,
        call=transcribed,
        args=(floats(2, 16, 10), IDS),
        attention=6,
    ),
]

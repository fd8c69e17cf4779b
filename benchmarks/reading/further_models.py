"""esm2quinox's proteins, memax's memories, FlaxDiff's diffusion, jaxnn's pictures.

jaxnn imports torchvision for the transforms of its pictures alone.
"""

# pyright: reportMissingImports=false

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import esm2quinox
import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flaxdiff.models.simple_dit import SimpleDiT
from flaxdiff.models.simple_mmdit import SimpleMMDiT
from flaxdiff.models.simple_unet import Unet
from flaxdiff.models.simple_vit import UViT
from flaxdiff.models.ssm_dit import HybridSSMAttentionDiT
from jax.experimental import checkify
from jaxnn.layers import DiffAttention
from jaxnn.models.resnet import BasicBlock, ResNet
from jaxnn.models.vision_transformer import VisionTransformer
from memax.equinox.train_utils import get_residual_memory_model

from .equinox_models import of as of_equinox
from .flax_models import of_nnx
from .models import Built, cross_entropy, floats, Model, tokens


LIBRARIES = ("esm2quinox", "memax", "flaxdiff", "jaxnn", "equinox", "flax")

KEY = jax.random.key(0)
IMAGE = floats(2, 16, 16, 3)


def protein_of(**options: Any) -> Built:
    def make(key: Any) -> Any:
        return esm2quinox.ESM2(2, 32, 4, key=key, **options)

    return of_equinox(make, tokens(2, 8, words=29), pick=lambda out: out.logits)


def memory_of(name: str) -> Built:
    """Two layers along a sequence that begins again in the middle."""
    net = get_residual_memory_model(name, 5, 16, 4, key=jax.random.PRNGKey(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)
    start = np.arange(12) % 7 == 0

    def loss(params: Any, x: Any) -> jax.Array:
        model = eqx.combine(params, static)
        return cross_entropy(model(model.initialize_carry(), (x, start))[1])

    return Built(loss, params, (floats(12, 5),))


def diffusion_of(net: nn.Module) -> Built:
    """A net of noisy pictures, times and texts."""
    args = IMAGE, floats(2), floats(2, 5, 12)
    params = jax.eval_shape(net.init, KEY, *args)["params"]

    def loss(params: Any, *args: Any) -> jax.Array:
        return cross_entropy(net.apply({"params": params}, *args))

    return Built(loss, params, args)


def picture_of(make: Callable[[nnx.Rngs], Any], **options: Any) -> Built:
    """jaxnn's checks of sizes need a function around them before they are jitted."""

    def checked(model: Any, x: Any) -> Any:
        return checkify.checkify(lambda x: model(x, **options))(x)[1]

    return of_nnx(make, checked, IMAGE)


def vit(**options: Any) -> Built:
    sizes: dict[str, Any] = dict(img_size=16, patch_size=4, num_classes=10)
    sizes |= dict(embed_dim=32, depth=2, num_heads=4) | options
    return picture_of(
        lambda rngs: VisionTransformer(**sizes, rngs=rngs), deterministic=True
    )


#: Equinox keeps the outputs first. A gate of one number for each token is a vector.
EQUINOX = {"*": "-", "*/weight": "oi", "*norm*/weight": "-", "map_out/weight": "-"}
PROTEIN = EQUINOX | {
    "layers/*/weight": "soi",
    "layers/layer_norm?/weight": "-",
    "logit_head/linear2/weight": "-",  # embeds the amino acids, too
}
MEMORY = EQUINOX | {"*/[BC]_??": "oi", "*/w/weight": "oi", "*/alpha/weight": "-"}
ONE_GATE = {"*/w/weight": "-"}
FLAX = {"*": "-", "*/kernel": "i*o", "final_proj/kernel": "-", "head/kernel": "-"}
FLAX |= {f"*/to_{name}/kernel": "ioo" for name in "qkv"} | {"*/to_out_0/kernel": "iio"}
FLAX |= {"ConvLayer_0/conv/kernel": "iiio|-", "ConvLayer_2/conv/kernel": "-|iiio"}
FLAX |= {"patch_embed/*/kernel": "iiio|-", "conv1/kernel": "iiio|-"}
FLAX |= {"*/s5_*/[BC]_??": "oi", "fc/fc/kernel": "-"}

DIT: dict[str, Any] = dict(patch_size=4, emb_features=32, num_layers=2, num_heads=4)
HYBRID: dict[str, Any] = DIT | dict(ssm_attention_ratio="1:1")


def unet() -> Built:
    heads = ({"heads": 4}, {"heads": 4})
    sizes: dict[str, Any] = dict(emb_features=32, feature_depths=(16, 32))
    return diffusion_of(Unet(**sizes, attention_configs=heads, num_res_blocks=1))


def resnet() -> Built:
    return picture_of(
        lambda rngs: ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10, rngs=rngs)
    )


def memory(name: str, verdicts: Any = MEMORY, **options: Any) -> Model:
    made = functools.partial(memory_of, name)
    return Model(f"memax, {name}", made, verdicts, **options)


MODELS = [
    Model(
        "esm2quinox, ESM2", lambda: protein_of(token_dropout=True), PROTEIN, attention=1
    ),
    memory("Attention", attention=2),
    memory("Attention-RoPE", attention=2),
    memory("Attention-ALiBi", attention=2, is_exact=False),
    *(memory(name) for name in ("Stack", "NMax", "FART", "FWP")),
    memory("DeltaNet", MEMORY | ONE_GATE),
    memory("DeltaProduct"),
    memory("GDN", MEMORY | ONE_GATE),
    *(memory(name) for name in ("FFM", "S6", "PSpherical", "LRU", "LinearRNN")),
    *(memory(name) for name in ("GRU", "Elman", "Spherical", "MGU", "LSTM")),
    Model("FlaxDiff, Unet", unet, FLAX, attention=5),
    Model("FlaxDiff, UViT", lambda: diffusion_of(UViT(**DIT)), FLAX, attention=3),
    Model("FlaxDiff, DiT", lambda: diffusion_of(SimpleDiT(**DIT)), FLAX, attention=2),
    Model(
        "FlaxDiff, MMDiT", lambda: diffusion_of(SimpleMMDiT(**DIT)), FLAX, attention=2
    ),
    Model(
        "FlaxDiff, state space and attention",
        lambda: diffusion_of(HybridSSMAttentionDiT(**HYBRID)),
        FLAX,
        attention=1,
    ),
    Model("jaxnn, ViT", vit, FLAX, attention=2),
    Model(
        "jaxnn, ViT, normalized query and key",
        lambda: vit(qk_norm=True, init_values=1e-5),
        FLAX,
        attention=2,
        shares_gains=True,
    ),
    Model(
        "jaxnn, ViT, latent pooling", lambda: vit(global_pool="map"), FLAX, attention=3
    ),
    # Two softmaxes a layer, of which one is subtracted.
    Model(
        "jaxnn, ViT, differential",
        lambda: vit(attn_layer=DiffAttention),
        FLAX,
        attention=4,
    ),
    # The pooling attends to what the last norm returns.
    Model(
        "jaxnn, ViT, pooling without kernels",
        lambda: vit(global_pool="prr"),
        FLAX,
        attention=2,
        refused=1,
    ),
    Model("jaxnn, ResNet", resnet, FLAX),
]

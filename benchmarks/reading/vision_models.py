"""big_vision's models, whose checkout has to be in `PYTHONPATH`.

PyPI has none of it: https://github.com/google-research/big_vision, here at 0127fb6. It
needs tensorflow and ml_collections.
"""

# pyright: reportMissingImports=false

import functools
from typing import Any

import flax.linen as nn
import jax
from big_vision.models import bit, mlp_mixer, vit

from .flax_models import HEADS
from .models import Built, cross_entropy, floats, Model


LIBRARIES = ("big_vision 0127fb6", "flax")

DENSE = {"*": "-", "*/kernel": "i*o", "head/kernel": "-"}
PATCHES = {"embedding/kernel": "iiio|-", "stem/kernel": "iiio|-"}
#: One scan runs the blocks, of which Flax stacks the leaves.
STACK = {f"Transformer/encoderblock/{k}": f"s{v}" for k, v in HEADS.items()}
STACK |= {"Transformer/encoderblock/*/Dense_?/kernel": "sio"}


def of(net: nn.Module, size: int = 16) -> Built:
    pixels = floats(2, size, size, 3)
    params = jax.eval_shape(net.init, jax.random.key(0), pixels)["params"]

    def loss(params: Any, pixels: Any) -> jax.Array:
        logits, _ = net.apply({"params": params}, pixels)  # type: ignore[misc]
        return cross_entropy(logits)

    return Built(loss, params, (pixels,))


def vision_transformer(**options: Any) -> Built:
    sizes = dict(patch_size=(4, 4), width=32, depth=2, num_heads=4)
    return of(vit.Model(10, **sizes, **options))


WHOLE = DENSE | HEADS | PATCHES

MODELS = [
    Model("ViT, mean", vision_transformer, WHOLE, attention=2),
    Model(
        "ViT, token",
        functools.partial(vision_transformer, pool_type="tok"),
        WHOLE,
        attention=2,
    ),
    # A learned probe looks at the patches.
    Model(
        "ViT, probe, scanned",
        functools.partial(vision_transformer, pool_type="map", scan=True),
        WHOLE | STACK,
        attention=2,
    ),
    Model(
        "MLP-Mixer",
        lambda: of(
            mlp_mixer.MlpMixer(
                num_classes=10,
                patch_size=(4, 4),
                num_blocks=2,
                hidden_dim=32,
                tokens_mlp_dim=24,
                channels_mlp_dim=64,
            )
        ),
        DENSE | PATCHES,
    ),
    Model(
        "BiT",
        lambda: of(bit.Model(10, width=0.5, depth=[1, 1]), 32),
        DENSE | {"root_block/*/kernel": "iiio|-", "conv_root/kernel": "iiio|-"},
    ),
]

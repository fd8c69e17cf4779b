"""Haiku's nets and examples."""

# pyright: reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from .models import Built, cross_entropy, floats, Model, tokens


LIBRARIES = ("dm-haiku",)

KEY = jax.random.key(0)
#: The width of a convolution's window and the inputs are in front of the outputs.
DENSE = {"*": "-", "*/w": "i*o", "*/w_[hi]": "io", "*head/w": "-", "*logits/w": "-"}


def of(forward: Callable[..., Any], *args: Any) -> Built:
    net = hk.transform_with_state(forward)
    params, state = jax.eval_shape(net.init, KEY, *args)
    state = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)

    def loss(params: Any, state: Any, *args: Any) -> jax.Array:
        return cross_entropy(net.apply(params, state, KEY, *args)[0])

    return Built(loss, params, (state, *args))


def normed(x: jax.Array) -> jax.Array:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


def transformer(ids: jax.Array) -> jax.Array:
    """As the example `transformer`, with dropout."""
    init = hk.initializers.VarianceScaling(1.0)
    x = hk.Embed(99, 32)(ids)
    x += hk.get_parameter("positions", [ids.shape[1], 32], init=init)
    mask = jnp.tril(jnp.ones((1, 1, ids.shape[1], ids.shape[1])))
    for _ in range(2):
        y = normed(x)
        attention = hk.MultiHeadAttention(4, 8, model_size=32, w_init=init)
        x += hk.dropout(hk.next_rng_key(), 0.1, attention(y, y, y, mask))
        x += hk.nets.MLP([64, 32], activation=jax.nn.gelu)(normed(x))
    return hk.Linear(99, name="head")(normed(x))


def stacked(ids: jax.Array) -> jax.Array:
    """Layers of `hk.layer_stack`, which scans them."""
    x = hk.Embed(99, 32)(ids)

    @hk.transparent
    def layer(x: jax.Array) -> jax.Array:
        init = hk.initializers.VarianceScaling(1.0)
        y = normed(x)
        x += hk.MultiHeadAttention(4, 8, w_init=init, name="attention")(y, y, y)
        return x + hk.nets.MLP([64, 32], name="mlp")(normed(x))

    x = hk.experimental.layer_stack(3)(layer)(x)
    return hk.Linear(99, name="head")(x)


def recurrent(x: jax.Array) -> jax.Array:
    core = hk.DeepRNN([hk.LSTM(16), jax.nn.tanh, hk.GRU(16), hk.VanillaRNN(16)])
    out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
    return hk.Linear(4, name="head")(out)


def quantized(x: jax.Array) -> jax.Array:
    """As the example `vqvae`: the codes are state, and pixels are written."""
    z = jax.nn.relu(hk.Conv2D(16, 4, stride=2, name="read")(x))
    z = hk.Conv2D(16, 3)(z)
    codes = hk.nets.VectorQuantizerEMA(16, 32, 0.25, 0.99)(z, is_training=True)
    y = jax.nn.relu(hk.Conv2D(16, 3)(codes["quantize"]))
    return hk.Conv2DTranspose(3, 4, stride=2, name="head")(y) + codes["loss"]


CONVOLUTIONS = DENSE | {
    "*initial_conv*/w": "i*o|-",
    "*/initial_conv/w": "i*o|-",
    "*depthwise*/w": "-|i*o",
}
IMAGE = floats(2, 32, 32, 3)

MODELS = [
    Model("transformer", lambda: of(transformer, tokens(2, 8)), DENSE, attention=2),
    Model(
        "layer_stack",
        lambda: of(stacked, tokens(2, 8)),
        DENSE | {"*layer_stack*/w": "sio"},
        attention=1,
    ),
    Model("LSTM, GRU, RNN", lambda: of(recurrent, floats(8, 2, 5)), DENSE),
    Model(
        "nets.ResNet18",
        lambda: of(lambda x: hk.nets.ResNet18(10)(x, is_training=True), IMAGE),
        CONVOLUTIONS,
    ),
    Model(
        "nets.ResNet50, version 2",
        lambda: of(
            lambda x: hk.nets.ResNet50(10, resnet_v2=True)(x, is_training=True), IMAGE
        ),
        CONVOLUTIONS,
    ),
    Model(
        "nets.MobileNetV1",
        lambda: of(
            lambda x: hk.nets.MobileNetV1((1, 2), (16, 32), 10)(x, is_training=True),
            IMAGE,
        ),
        CONVOLUTIONS,
    ),
    Model(
        "nets.VectorQuantizerEMA",
        lambda: of(quantized, floats(2, 8, 8, 3)),
        DENSE | {"*read/w": "i*o|-", "*head/w": "-|iioi"},
    ),
    Model(
        "nets.MLP",
        lambda: of(
            lambda x: hk.Linear(4, name="head")(
                hk.nets.MLP([32, 32], activate_final=True)(x)
            ),
            floats(2, 7),
        ),
        DENSE | {"mlp/~/linear_0/w": "io|-"},
    ),
]

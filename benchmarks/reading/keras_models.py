"""Keras 3 on JAX by `stateless_call`, its applications and its layers.

Parameters are a dictionary by the paths that Keras gives its variables.
"""

# pyright: reportMissingImports=false

import os
from collections.abc import Callable, Mapping
from typing import Any


os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
from keras import layers

from .models import Built, cross_entropy, floats, Model, tokens


LIBRARIES = ("keras",)

DENSE = {
    "*": "-",
    "*/kernel": "i*o",
    "*/recurrent_kernel": "io",
    "*/pointwise_kernel": "i*o",
    "predictions/kernel": "-",
    "head/kernel": "-",
    # Depthwise windows: (height, width, channels, 1).
    "*depthwise*/kernel": "-",
    "*dwconv*/kernel": "-",
}
HEADS = {f"*/{name}/kernel": "ioo" for name in ("query", "key", "value")}
HEADS |= {"*/attention_output/kernel": "iio"}
#: Those that read pixels.
PIXELS: dict[str, str] = dict.fromkeys(
    ("Conv1/kernel", "conv/kernel", "conv1_conv/kernel", "*stem_conv/kernel"), "iiio|-"
)


def of(make: Callable[[], keras.Model], *args: Any) -> Built:
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    net = make()
    names = [v.path for v in net.trainable_variables]
    params = {v.path: jnp.asarray(v.value) for v in net.trainable_variables}
    state = [jnp.asarray(v.value) for v in net.non_trainable_variables]

    def loss(params: Any, state: Any, *args: Any) -> jax.Array:
        values = [params[name] for name in names]
        out, _ = net.stateless_call(values, state, *args, training=True)
        return cross_entropy(out)

    return Built(loss, params, (state, *args))


def encoder() -> keras.Model:
    """As the example of text classification with a transformer."""
    ids = keras.Input((8,), dtype="int32")
    x = layers.Embedding(99, 32)(ids)
    x += layers.Embedding(8, 32, name="position")(jnp.arange(8))
    for _ in range(2):
        y = layers.MultiHeadAttention(4, 8, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + y)
        y = layers.Dense(32)(layers.Dense(64, activation="relu")(x))
        x = layers.LayerNormalization()(x + y)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, layers.Dense(5, name="head")(x))


def grouped() -> keras.Model:
    """Causal attention with two key heads."""
    ids = keras.Input((8,), dtype="int32")
    x = layers.Embedding(99, 32)(ids)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        attention = layers.GroupQueryAttention(8, 4, 2)
        x += attention(y, y, use_causal_mask=True)
        x += layers.Dense(32)(layers.Dense(64, activation="gelu")(x))
    return keras.Model(ids, layers.Dense(99, name="head")(x))


def recurrent() -> keras.Model:
    ids = keras.Input((8,), dtype="int32")
    x = layers.Embedding(99, 32)(ids)
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(x)
    x = layers.GRU(16, return_sequences=True)(x)
    x = layers.SimpleRNN(16)(x)
    return keras.Model(ids, layers.Dense(5, name="head")(x))


def separable() -> keras.Model:
    pixels = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, strides=2, name="stem_conv")(pixels)
    x = layers.BatchNormalization()(x)
    x = layers.SeparableConv2D(32, 3, activation="relu")(x)
    x = layers.DepthwiseConv2D(3, name="depthwise")(x)
    x = layers.Conv2DTranspose(16, 3, name="up")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(pixels, layers.Dense(5, name="head")(x))


def application(
    name: str, verdicts: Mapping[str, str] = PIXELS, **options: Any
) -> Model:
    def make() -> keras.Model:
        small: dict[str, Any] = dict(weights=None, classes=10, input_shape=(32, 32, 3))
        return getattr(keras.applications, name)(**small, **options)

    return Model(f"applications.{name}", lambda: of(make, IMAGE), {**DENSE, **verdicts})


IMAGE = floats(2, 32, 32, 3)

MODELS = [
    Model(
        "layers.MultiHeadAttention",
        lambda: of(encoder, tokens(2, 8)),
        DENSE | HEADS,
        attention=2,
    ),
    Model(
        "layers.GroupQueryAttention",
        lambda: of(grouped, tokens(2, 8)),
        DENSE | HEADS,
        attention=2,
    ),
    Model("layers.LSTM, GRU, SimpleRNN", lambda: of(recurrent, tokens(2, 8)), DENSE),
    Model(
        "layers.SeparableConv2D",
        lambda: of(separable, IMAGE),
        # A transposed convolution keeps (height, width, outputs, inputs).
        DENSE | PIXELS | {"*depthwise_kernel": "-", "up/kernel": "iioi"},
    ),
    application("MobileNetV2", alpha=0.35),
    application("MobileNetV3Small", PIXELS | {"logits/kernel": "-"}, alpha=0.75),
    application(
        "ConvNeXtTiny",
        {
            "*depthwise_conv/kernel": "-",
            "*stem*/kernel": "iiio|-",
            "*head_dense/kernel": "-",
        },
    ),
    application("ResNet50V2"),
    application("EfficientNetB0"),
    application("DenseNet121"),
]

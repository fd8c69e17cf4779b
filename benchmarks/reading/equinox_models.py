"""Equinox's layers as its examples use them, Equimo's pictures, and Haliax.

Equinox keeps (outputs, inputs, window).
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .models import Built, cross_entropy, floats, Model, tokens


LIBRARIES = ("equinox",)

KEY = jax.random.key(0)
DENSE = {"*": "-", "*weight": "oi*", "*weight_??": "oi", "*norm*/weight": "-"}
DENSE |= {"*embed*/weight": "-", "*head/weight": "-"}


def of(
    make: Callable[[Any], Any],
    *args: Any,
    pick: Callable[[Any], jax.Array] = lambda out: out,
    **options: Any,
) -> Built:
    """The loss of what `pick` takes is over a batch, one example at a time."""
    net = eqx.filter_eval_shape(make, KEY)
    params, static = eqx.partition(net, lambda x: hasattr(x, "shape"))

    def loss(params: Any, *args: Any) -> jax.Array:
        model = functools.partial(eqx.combine(params, static), **options)
        return cross_entropy(pick(jax.vmap(model)(*args)))

    return Built(loss, params, args)


class Encoder(eqx.Module):
    """As the example `bert`: learned positions, norms after the residual."""

    embed: eqx.nn.Embedding
    position: jax.Array
    attention: list[eqx.nn.MultiheadAttention]
    mlp: list[eqx.nn.MLP]
    norm: list[eqx.nn.LayerNorm]
    rope: eqx.nn.RotaryPositionalEmbedding
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = iter(jax.random.split(key, 8))
        self.embed = eqx.nn.Embedding(99, 32, key=next(keys))
        self.position = jax.random.normal(next(keys), (8, 32))
        self.attention = [
            eqx.nn.MultiheadAttention(
                4, 32, use_query_bias=bias, use_key_bias=bias, key=next(keys)
            )
            for bias in (False, True)
        ]
        self.mlp = [eqx.nn.MLP(32, 32, 64, 1, key=next(keys)) for _ in range(2)]
        self.norm = [eqx.nn.LayerNorm(32) for _ in range(4)]
        self.rope = eqx.nn.RotaryPositionalEmbedding(8)
        self.head = eqx.nn.Linear(32, 99, key=next(keys))

    def __call__(self, ids: jax.Array) -> jax.Array:
        def rotated(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
            return jax.vmap(self.rope, 1, 1)(q), jax.vmap(self.rope, 1, 1)(k), v

        x = jax.vmap(self.embed)(ids) + self.position
        for i in range(2):
            y = self.attention[i](x, x, x, process_heads=rotated)
            x = jax.vmap(self.norm[2 * i])(x + y)
            x = jax.vmap(self.norm[2 * i + 1])(x + jax.vmap(self.mlp[i])(x))
        return jax.vmap(self.head)(x)


class Convolutional(eqx.Module):
    """As the example `mnist`, with a depthwise and a grouped convolution."""

    layers: list[Any]
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 5)
        self.layers = [
            eqx.nn.Conv2d(3, 8, 4, key=keys[0]),
            eqx.nn.MaxPool2d(2),
            eqx.nn.Conv2d(8, 8, 3, groups=8, key=keys[1]),
            jax.nn.relu,
            eqx.nn.Conv2d(8, 16, 3, groups=2, key=keys[2]),
            jnp.ravel,
            eqx.nn.Linear(16 * 20 * 20, 32, key=keys[3]),
            jax.nn.relu,
        ]
        self.head = eqx.nn.Linear(32, 10, key=keys[4])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recurrent(eqx.Module):
    """As the example `train_rnn`: a cell that a scan runs."""

    gru: eqx.nn.GRUCell
    lstm: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.gru = eqx.nn.GRUCell(5, 16, key=keys[0])
        self.lstm = eqx.nn.LSTMCell(16, 16, key=keys[1])
        self.head = eqx.nn.Linear(16, 4, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(carry: Any, x: Any) -> tuple[Any, None]:
            hidden, state = carry
            hidden = self.gru(x, hidden)
            return (hidden, self.lstm(hidden, state)), None

        zeros = jnp.zeros(16)
        (_, (out, _)), _ = jax.lax.scan(step, (zeros, (zeros, zeros)), x)
        return self.head(out)


class Ensemble(eqx.Module):
    """As the guide on ensembles: layers made by `filter_vmap`, run by one."""

    mlps: eqx.nn.MLP

    def __init__(self, key: Any):
        make = eqx.filter_vmap(lambda key: eqx.nn.MLP(7, 5, 32, 2, key=key))
        self.mlps = make(jax.random.split(key, 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = eqx.filter_vmap(lambda mlp, x: mlp(x), in_axes=(eqx.if_array(0), None))
        return run(self.mlps, x)


MODELS = [
    Model(
        "example bert, with rotation",
        lambda: of(Encoder, tokens(2, 8)),
        DENSE | {"norm/*": "-"},
        attention=2,
    ),
    Model(
        "example mnist",
        lambda: of(Convolutional, floats(2, 3, 28, 28)),
        DENSE | {"layers/0/weight": "oiii|-", "layers/2/weight": "-|oiii"},
    ),
    Model("example rnn", lambda: of(Recurrent, floats(2, 6, 5)), DENSE),
    Model(
        "ensembling",
        lambda: of(Ensemble, floats(2, 7)),
        DENSE | {"*weight": "soi", "mlps/layers/2/weight": "-"},
    ),
]

"""Equinox's and Haiku's own attention: the next logits are `min(S, tau)`.

A language model in each, whose attention has two layers, read and recorded untouched.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import few, first_update

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

VOCABULARY, WIDTH, HEADS, HEAD_DIM, LENGTH = 17, 24, 3, 8, 9
TOKENS = jnp.asarray(
    np.random.default_rng(1).integers(0, VOCABULARY, (4, LENGTH + 1)), jnp.int32
)


@dataclasses.dataclass
class Model:
    """`apply(params, tokens)` gives logits."""

    params: Any
    apply: Callable[[Any, jax.Array], jax.Array]


def loss_of(model):
    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    return loss


def read(model):
    return mc.read_model(loss_of(model), model.params, TOKENS)


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(
            HEADS, WIDTH, use_query_bias=True, key=first
        )
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=second)

    def __call__(self, x):
        y, mask = jax.vmap(self.norm)(x), jnp.tri(len(x), dtype=bool)
        x = x + self.attention(y, y, y, mask=mask)
        return x + jax.vmap(self.mlp)(x)


class EquinoxModel(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[EquinoxBlock]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.blocks = [EquinoxBlock(key) for key in keys[1:3]]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def equinox():
    whole = EquinoxModel(jax.random.key(0))
    params, static = eqx.partition(whole, eqx.is_inexact_array)

    def apply(params, tokens):
        return jax.vmap(eqx.combine(params, static))(tokens)

    return Model(params, apply)


def haiku_forward(tokens):
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    for i in range(2):
        attention = hk.MultiHeadAttention(
            HEADS, HEAD_DIM, model_size=WIDTH, name=f"attention_{i}",
            w_init=hk.initializers.VarianceScaling(),
        )  # fmt: skip
        y = hk.LayerNorm(-1, True, True, name=f"norm_{i}")(x)
        x = x + attention(y, y, y, jnp.tri(LENGTH, dtype=bool)[None, None])
        x = x + hk.nets.MLP([2 * WIDTH, WIDTH], name=f"mlp_{i}")(x)
    return hk.Linear(VOCABULARY, name="head")(x)


def haiku():
    transformed = hk.without_apply_rng(hk.transform(haiku_forward))
    params = transformed.init(jax.random.key(0), TOKENS[:, :-1])

    return Model(params, transformed.apply)


MODELS = {"Equinox": equinox, "Haiku": haiku}


@pytest.mark.more
@pytest.mark.parametrize("name", few(MODELS, "Haiku"))
def test_next_logits_are_at_most_the_threshold(name):
    """Of the first layer: what later ones see changes with the clip."""
    model = MODELS[name]()
    record = jax.jit(mc.record_attention(loss_of(model)))

    def first_layer(stats):
        return np.asarray(jax.tree.leaves(stats)[0]).reshape(-1, HEADS)[0]

    _, before = record(model.params, TOKENS)
    tau = float(np.median(first_layer(before)))
    tx = mc.muonclip(0.0, threshold=tau, model=read(model))
    zeros = jax.tree.map(jnp.zeros_like, model.params)
    updates = first_update(tx, zeros, model.params, attention_stats=before)
    _, after = record(optax.apply_updates(model.params, updates), TOKENS)
    expected = np.minimum(first_layer(before), tau)
    np.testing.assert_allclose(first_layer(after), expected, rtol=1e-4)

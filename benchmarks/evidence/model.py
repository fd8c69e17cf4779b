"""The models that are trained: byte-level transformers without biases."""

from typing import Any

import jax
import jax.numpy as jnp
from corpus import VOCABULARY
from flax import nnx
from kimi_k2_model import KimiK2, rotate, Sizes

import muonclip_jax as mc

from .run import Run


def make_model(run: Run, rngs: nnx.Rngs) -> nnx.Module:
    if run.model == "kimi_k2":
        return KimiK2(Sizes(VOCABULARY, run.layers, run.width, run.heads), rngs)
    return Transformer(run, rngs)


class Attention(nnx.Module):
    """Causal attention with rotary embedding; a key may serve several queries."""

    def __init__(self, run: Run, rngs: nnx.Rngs):
        self.heads = (run.heads, run.key_heads or run.heads)
        self.features = features = run.width // run.heads
        if run.fused:
            self.query_key_value = linear(run.width, 3 * run.width, rngs)
        else:
            query, key = self.heads
            self.query = projection(run.width, (query, features), rngs)
            self.key = projection(run.width, (key, features), rngs)
            self.value = projection(run.width, (key, features), rngs)
        if run.normalized:
            self.query_norm = nnx.RMSNorm(features, rngs=rngs)
            self.key_norm = nnx.RMSNorm(features, rngs=rngs)
        self.fused, self.normalized = run.fused, run.normalized
        self.statistics = run.statistics
        self.out = nnx.LinearGeneral(
            (run.heads, features), run.width, axis=(-2, -1), use_bias=False, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.project(x)
        if self.normalized:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query), rotate(key)
        module = self if self.statistics else None
        return self.out(
            mc.attention_fn(query, key, value, is_causal=True, module=module)
        )

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns three arrays `(batch, length, heads, features)`."""
        if not self.fused:
            return self.query(x), self.key(x), self.value(x)
        together = self.query_key_value(x)
        shape = (*x.shape[:-1], 3, self.heads[0], self.features)
        query, key, value = jnp.moveaxis(together.reshape(shape), -3, 0)
        return query, key, value


class Block(nnx.Module):
    """Pre-norm attention and a squared-ReLU feed-forward layer."""

    def __init__(self, run: Run, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(run.width, rngs=rngs)
        self.attention = Attention(run, rngs)
        self.mlp_norm = nnx.RMSNorm(run.width, rngs=rngs)
        self.up = linear(run.width, 4 * run.width, rngs)
        self.down = linear(4 * run.width, run.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jnp.square(jax.nn.relu(self.up(self.mlp_norm(x)))))


class Transformer(nnx.Module):
    """Logits of the next byte, `(batch, length)` to `(batch, length, vocabulary)`."""

    def __init__(self, run: Run, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, run.width, rngs=rngs)
        self.blocks = nnx.List([Block(run, rngs) for _ in range(run.layers)])
        self.norm = nnx.RMSNorm(run.width, rngs=rngs)
        self.head = linear(run.width, VOCABULARY, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


def projection(
    inputs: int, outputs: tuple[int, int], rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    return nnx.LinearGeneral(inputs, outputs, use_bias=False, rngs=rngs)


def largest_logits(stats: Any) -> jax.Array:
    """The statistics of all layers, `(layers, heads)`; zero if there are none."""
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(stats)]
    return jnp.stack(leaves) if leaves else jnp.zeros((1, 1))

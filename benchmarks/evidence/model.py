"""The models that are trained: byte-level transformers without biases."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import muonclip_jax as mc

from .experts import HIDDEN, MixtureOfExperts, SwiGLU
from .latent_attention import LatentAttention
from .layers import from_heads, linear, rotate, to_heads
from .run import Run
from .texts import VOCABULARY


class Transformer(nnx.Module):
    """Logits of the next byte, `(batch, length)` to `(batch, length, vocabulary)`."""

    def __init__(self, run: Run, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, run.width, rngs=rngs)
        self.blocks = nnx.List([make_block(run, i, rngs) for i in range(run.layers)])
        self.norm = nnx.RMSNorm(run.width, rngs=rngs)
        self.head = linear(run.width, VOCABULARY, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_block(run: Run, index: int, rngs: nnx.Rngs) -> nnx.Module:
    if run.model == "kimi_k2":
        return KimiK2Block(run, index == 0, rngs)
    return Block(run, rngs)


class KimiK2Block(nnx.Module):
    """Kimi K2's pre-norm layer in miniature, with experts unless it is dense."""

    def __init__(self, run: Run, dense: bool, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(run.width, rngs=rngs)
        self.attention = LatentAttention(run, rngs)
        self.mlp_norm = nnx.RMSNorm(run.width, rngs=rngs)
        if dense:
            self.mlp = SwiGLU(run.width, HIDDEN, rngs)
        else:
            self.mlp = MixtureOfExperts(run.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


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


class Attention(nnx.Module):
    """Causal attention with rotary embedding."""

    def __init__(self, run: Run, rngs: nnx.Rngs):
        self.shape = (run.heads, run.width // run.heads)
        if run.fused:
            self.query_key_value = linear(run.width, 3 * run.width, rngs)
        else:
            of_heads = (to_heads(run.width, *self.shape, rngs) for _ in range(3))
            self.query, self.key, self.value = of_heads
        if run.normalized:
            self.query_norm = nnx.RMSNorm(self.shape[1], rngs=rngs)
            self.key_norm = nnx.RMSNorm(self.shape[1], rngs=rngs)
        self.fused, self.normalized = run.fused, run.normalized
        self.statistics = run.statistics
        self.out = from_heads(*self.shape, run.width, rngs)

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
        shape = (*x.shape[:-1], 3, *self.shape)
        query, key, value = jnp.moveaxis(together.reshape(shape), -3, 0)
        return query, key, value


def largest_logits(stats: Any) -> jax.Array:
    """The statistics of all layers, `(layers, heads)`; zero if there are none."""
    leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(stats)]
    return jnp.stack(leaves) if leaves else jnp.zeros((1, 1))

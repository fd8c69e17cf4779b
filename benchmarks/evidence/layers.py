"""Layers without biases, and rotary embedding: what both kinds of attention need."""

import jax
import jax.numpy as jnp
from flax import nnx


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


def to_heads(
    inputs: int, heads: int, features: int, rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    return nnx.LinearGeneral(inputs, (heads, features), use_bias=False, rngs=rngs)


def from_heads(
    heads: int, features: int, outputs: int, rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    return nnx.LinearGeneral(
        (heads, features), outputs, axis=(-2, -1), use_bias=False, rngs=rngs
    )


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding over the last axis of `(batch, length, heads, features)`."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

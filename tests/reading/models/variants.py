"""Sizes and pieces that the tests of readings share."""

import jax
import jax.numpy as jnp


B, T, D, H, DIM = 2, 5, 12, 4, 6  # batch, tokens, features, heads, features of each


def cut(x, heads=H):
    return x.reshape(*x.shape[:2], heads, -1)


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def logits(p, x):
    return jnp.einsum("bqhd,bkhd->bhqk", cut(x @ p["q"]), cut(x @ p["k"]))


def mixed(weights, value):
    """Every head weighs the same values, `(batch, keys, features)`."""
    return jnp.einsum("bhqk,bkd->bqhd", weights, value)


def attend(logits, value):
    return mixed(jax.nn.softmax(logits), value)


FLAT = (D, H * DIM)

"""Products of attention with a block of logits, and blocks put where they belong."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def product(query: jax.Array, key: jax.Array) -> jax.Array:
    """All inner products, `(batch..., heads, length, key_length)` float32."""
    heads, key_heads = query.shape[-2], key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, -1)
    # Spelled as in jax.nn.dot_product_attention, so that XLA computes both once.
    einsum = functools.partial(
        jnp.einsum, "...tnh,...snh->...nts", preferred_element_type=jnp.float32
    )
    logits = jax.vmap(lambda q: einsum(q, key), in_axes=-2, out_axes=-3)(grouped)
    return logits.reshape(*query.shape[:-3], heads, *logits.shape[-2:])


def weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
    """`(batch..., heads, length, dim)`: the values of the keys, by their weights."""
    summed = jnp.einsum(
        "...kgts,...skh->...kgth",
        _grouped(weights, values.shape[-2]).astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return summed.reshape(*weights.shape[:-1], -1)


def gather(weights: jax.Array, rows: jax.Array, key_heads: int) -> jax.Array:
    """`(batch..., key_length, key_heads, dim)`: the rows of the queries, by weight."""
    return jnp.einsum(
        "...kgts,...tkgh->...skh",
        _grouped(weights, key_heads).astype(rows.dtype),
        rows.reshape(*rows.shape[:-2], key_heads, -1, rows.shape[-1]),
        preferred_element_type=jnp.float32,
    )


def _grouped(weights: jax.Array, key_heads: int) -> jax.Array:
    *batch, heads, queries, keys = weights.shape
    return weights.reshape(*batch, key_heads, heads // key_heads, queries, keys)


def put(target: jax.Array, block: jax.Array, starts: dict[int, Any]) -> jax.Array:
    """Writes a block that begins at `starts`, by axis."""
    indices = _indices(target, starts)
    return jax.lax.dynamic_update_slice(target, block.astype(target.dtype), indices)


def add(target: jax.Array, block: jax.Array, starts: dict[int, Any]) -> jax.Array:
    indices = _indices(target, starts)
    old = jax.lax.dynamic_slice(target, indices, block.shape)
    return jax.lax.dynamic_update_slice(target, old + block, indices)


def _indices(target: jax.Array, starts: dict[int, Any]) -> list[Any]:
    """JAX moves a block in that would not fit: at the end, or as wide as the target."""
    return [starts.get(axis, 0) for axis in range(-target.ndim, 0)]

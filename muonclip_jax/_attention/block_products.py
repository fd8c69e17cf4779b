"""Products of attention with a block of logits, and blocks put where they belong."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def product(query: jax.Array, key: jax.Array, dtype: Any) -> jax.Array:
    """All inner products, `(batch..., heads, length, key_length)` of the dtype."""
    if query.dtype != key.dtype:
        query, key = query.astype(dtype), key.astype(dtype)
    # Spelled as in jax.nn.dot_product_attention, so that XLA computes both once.
    einsum = functools.partial(
        jnp.einsum, "...tnh,...snh->...nts", preferred_element_type=dtype
    )
    grouped = _grouped(query, key.shape[-2], axis=-2)
    logits = jax.vmap(lambda q: einsum(q, key), in_axes=-2, out_axes=-3)(grouped)
    return logits.reshape(*query.shape[:-3], query.shape[-2], *logits.shape[-2:])


def weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
    """`(batch..., heads, length, dim)`: the values of the keys, by their weights."""
    summed = jnp.einsum(
        "...kgts,...skh->...kgth",
        _grouped(weights, values.shape[-2], axis=-3).astype(values.dtype),
        values,
        preferred_element_type=weights.dtype,
    )
    return summed.reshape(*weights.shape[:-1], values.shape[-1])


def gather(weights: jax.Array, rows: jax.Array, key_heads: int) -> jax.Array:
    """`(batch..., key_length, key_heads, dim)`: the rows of the queries, by weight."""
    return jnp.einsum(
        "...kgts,...tkgh->...skh",
        _grouped(weights, key_heads, axis=-3).astype(rows.dtype),
        _grouped(rows, key_heads, axis=-2),
        preferred_element_type=weights.dtype,
    )


def _grouped(x: jax.Array, key_heads: int, *, axis: int) -> jax.Array:
    """Heads as those of the keys by the queries that share one."""
    heads = x.shape[axis]
    groups = (key_heads, heads // max(key_heads, 1))
    return x.reshape(*x.shape[:axis], *groups, *x.shape[axis + 1 :])


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

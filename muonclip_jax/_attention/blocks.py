"""Blocks of queries and keys: which there are, and products with them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .logits import make_window, Pairs, Window


class Plan(NamedTuple):
    """What is known at compile time."""

    scale: float
    window: Window
    size: int  # of a block


def make_plan(
    query: jax.Array,
    scale: float | None,
    is_causal: bool,
    local_window_size: int | tuple[int, int] | None,
    size: int,
) -> Plan:
    given = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Plan(given, make_window(is_causal, local_window_size), size)


def key_blocks(plan: Plan, pairs: Pairs, i: jax.Array) -> tuple[Any, Any]:
    """The range of the key blocks that block `i` of the queries sees."""
    queries, keys = pairs.query.shape[-3], pairs.key.shape[-3]
    rows = min(queries, plan.size)
    start = jnp.minimum(i * plan.size, queries - rows)
    before, after = plan.window
    first, last = 0, -(-keys // plan.size)
    if before is not None:
        first = jnp.maximum(first, (start - before) // plan.size)
    if after is not None:
        last = jnp.minimum(last, (start + rows - 1 + after) // plan.size + 1)
    return first, last


def block_logits(plan: Plan, pairs: Pairs, i: jax.Array, j: jax.Array) -> jax.Array:
    """The logits of a block, every key in one block only.

    The last block is moved in to fit, onto keys that the one before it has.
    """
    block = pairs.block(i * plan.size, j * plan.size, plan.size)
    logits = block.logits(plan.scale, plan.window)
    return jnp.where(block.key_positions < j * plan.size, -jnp.inf, logits)


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

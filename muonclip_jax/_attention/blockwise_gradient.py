"""The gradient of blockwise attention, its logits formed again block by block."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .blocks import add, block_logits, gather, key_blocks, Plan, weigh
from .logits import cut, Pairs, product


class _Rows(NamedTuple):
    """What the gradient needs of the queries, all of them or a block."""

    d_output: jax.Array  # (batch..., length, heads, value_dim)
    mean: jax.Array  # (batch..., heads, length); of the weights' gradients
    log_total: jax.Array  # (batch..., heads, length); of the softmax

    def block(self, start: jax.Array, size: int) -> "_Rows":
        length = self.mean.shape[-1]
        return _Rows(
            cut(self.d_output, start, length, size, axis=-3),
            cut(self.mean, start, length, size, axis=-1),
            cut(self.log_total, start, length, size, axis=-1),
        )


def gradient(
    plan: Plan,
    pairs: Pairs,
    value: jax.Array,
    output: jax.Array,
    log_total: jax.Array,
    d_output: jax.Array,
) -> tuple[Any, jax.Array]:
    """Returns the gradients of `pairs`, as `custom_vjp` wants them, and of `value`."""
    mean = jnp.sum(d_output.astype(jnp.float32) * output, axis=-1)
    rows = _Rows(d_output.astype(value.dtype), jnp.swapaxes(mean, -2, -1), log_total)

    def fold_row(i: jax.Array, grads):
        row = rows.block(i * plan.size, plan.size)
        # The last block is moved in, onto queries that are done: no weight for them.
        positions = cut(
            pairs.query_positions, i * plan.size, mean.shape[-2], plan.size, axis=-1
        )
        logs = jnp.where(positions < i * plan.size, jnp.inf, row.log_total)
        row = row._replace(log_total=logs)

        def fold(j: jax.Array, grads):
            return _add_block(plan, pairs, value, row, i, j, grads)

        return jax.lax.fori_loop(*key_blocks(plan, pairs, i), fold, grads)

    inputs = (pairs.query, pairs.key, value, pairs.bias)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs)
    blocks = -(-mean.shape[-2] // plan.size)
    grads = jax.lax.fori_loop(0, blocks, fold_row, zeros)
    d_query, d_key, d_value, d_bias = jax.tree.map(
        lambda g, x: g.astype(x.dtype), grads, inputs
    )
    return Pairs(d_query, d_key, d_bias, *[None] * 5), d_value  # pyright: ignore


def _add_block(plan: Plan, pairs: Pairs, value, row: _Rows, i, j, grads):
    """Adds what one block contributes to the gradients of query, key, value, bias."""
    i_start, j_start = i * plan.size, j * plan.size
    block = pairs.block(i_start, j_start, plan.size)
    values = cut(value, j_start, value.shape[-3], plan.size, axis=-3)
    weights = jnp.exp(block_logits(plan, pairs, i, j) - row.log_total[..., None])
    d_logits = weights * (product(row.d_output, values) - row.mean[..., None])
    scaled, key_heads = plan.scale * d_logits, value.shape[-2]
    d_query, d_key, d_value, d_bias = grads
    if block.bias is not None:
        part = _sum_to(d_logits, block.bias.shape)
        d_bias = add(d_bias, part, {-2: i_start, -1: j_start})
    return (
        add(d_query, jnp.swapaxes(weigh(scaled, block.key), -3, -2), {-3: i_start}),
        add(d_key, gather(scaled, block.query, key_heads), {-3: j_start}),
        add(d_value, gather(weights, row.d_output, key_heads), {-3: j_start}),
        d_bias,
    )


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes broadcasting from `shape`."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    spread = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(spread, keepdims=True)

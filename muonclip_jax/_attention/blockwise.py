"""Attention and its largest logits in one pass, in memory linear in the length.

The running softmax of Milakov and Gimelshein (arXiv:1805.02867) over blocks of keys;
the gradient recomputes the blocks (FlashAttention, arXiv:2205.14135).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .blocks import block_logits, key_blocks, make_plan, Plan, put, weigh
from .blockwise_gradient import gradient
from .logits import cut, make_pairs, Pairs


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    block_size: int = 512,
) -> tuple[jax.Array, jax.Array]:
    r"""Attention and the largest value that enters its softmax, per head.

    $$\mathrm{softmax}(s\,QK^\top + \mathrm{bias})\,V \qquad\text{and}\qquad
      S_h = \max_{b,i,j} \; s\, q_{bih} \cdot k_{bjh} + \mathrm{bias}_{bhij}$$

    equal to `jax.nn.dot_product_attention` and to [`max_logits`][], its gradient too,
    but never with more than a block of logits in memory. A query that sees no key gets
    zeros.

    **Arguments:**

    - `value`: `(batch..., key_length, key_heads, value_dim)`.
    - `block_size`: queries and keys in a block.
    - all others: as for [`max_logits`][].

    **Returns:** the output, `(batch..., length, heads, value_dim)` in the dtype of
    `value`, and the statistic, `(heads,)` float32 without gradient.

    **Raises:** `ValueError` where heads or sizes do not fit.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> output, max_logits = mc.blockwise_attention(x, x, x, is_causal=True)
        >>> output.shape, max_logits
        ((1, 3, 2, 4), Array([2., 2.], dtype=float32))

        As the attention of a Flax layer:

        >>> import functools
        >>> attention_fn = functools.partial(
        ...     mc.attention_fn, kernel=mc.blockwise_attention
        ... )
    """
    pairs = make_pairs(query, key, bias, mask, query_segment_ids, key_segment_ids)
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"key {key.shape} and value {value.shape} do not fit")
    plan = make_plan(query, scale, is_causal, local_window_size, block_size)
    return _attend(plan, pairs, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, pairs: Pairs, value: jax.Array):
    output, _, largest = _forward(plan, pairs, value)
    return output, largest


def _attend_forward(plan: Plan, pairs: Pairs, value: jax.Array):
    output, log_total, largest = _forward(plan, pairs, value)
    return (output, largest), (pairs, value, output, log_total)


def _attend_backward(plan: Plan, residuals, cotangents):
    pairs, value, output, log_total = residuals
    return gradient(plan, pairs, value, output, log_total, cotangents[0])


_attend.defvjp(_attend_forward, _attend_backward)


class _Softmax(NamedTuple):
    """Running rows of a softmax times values."""

    largest: jax.Array  # (batch..., heads, rows)
    total: jax.Array  # of exp(logits - largest)
    output: jax.Array  # (batch..., heads, rows, value_dim), to be divided by total


def _forward(plan: Plan, pairs: Pairs, value: jax.Array):
    """Returns the output, the logarithm of the softmax's sum and the statistic."""
    *batch, queries, heads, _ = pairs.query.shape

    def attend(i: jax.Array, done):
        output, log_total, statistic = done
        row = _attend_row(plan, pairs, value, i)
        seen = row.total > 0
        block = row.output / jnp.where(seen, row.total, 1)[..., None]
        # Infinite where nothing is seen: the gradient's weights are then zero.
        logs = jnp.where(seen, row.largest + jnp.log(row.total), jnp.inf)
        others = tuple(a for a in range(logs.ndim) if a != logs.ndim - 2)
        return (
            put(output, jnp.swapaxes(block, -3, -2), {-3: i * plan.size}),
            put(log_total, logs, {-1: i * plan.size}),
            jnp.maximum(statistic, row.largest.max(others)),
        )

    nothing = (
        jnp.zeros((*batch, queries, heads, value.shape[-1]), value.dtype),
        jnp.zeros((*batch, heads, queries), jnp.float32),
        jnp.full(heads, -jnp.inf, jnp.float32),
    )
    return jax.lax.fori_loop(0, -(-queries // plan.size), attend, nothing)


def _attend_row(plan: Plan, pairs: Pairs, value: jax.Array, i: jax.Array) -> _Softmax:
    """The softmax of a block of queries over all the keys that they see."""
    *batch, queries, heads, _ = pairs.query.shape

    def fold(j: jax.Array, running: _Softmax) -> _Softmax:
        logits = block_logits(plan, pairs, i, j)
        values = cut(value, j * plan.size, value.shape[-3], plan.size, axis=-3)
        largest = jnp.maximum(running.largest, logits.max(-1))
        # A row that has seen nothing yet has no finite maximum to take off.
        shift = jnp.where(jnp.isfinite(largest), largest, 0)
        weights = jnp.exp(logits - shift[..., None])
        decay = jnp.exp(running.largest - shift)
        return _Softmax(
            largest,
            decay * running.total + weights.sum(-1),
            decay[..., None] * running.output + weigh(weights, values),
        )

    shape = (*batch, heads, min(queries, plan.size))
    nothing = _Softmax(
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, value.shape[-1]), jnp.float32),
    )
    return jax.lax.fori_loop(*key_blocks(plan, pairs, i), fold, nothing)

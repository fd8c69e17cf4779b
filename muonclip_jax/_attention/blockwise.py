"""Computes attention and its largest logits in one pass, in linear memory.

It runs the softmax over blocks of keys; the gradient recomputes the blocks.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._mesh_axes import explicit_spec, on_automatic_axes
from .._model.statistics import keep_nan, largest
from .._options import check_whole_number
from .logits import (
    grouped,
    Logits,
    logits_and_values,
    make_window,
    product,
    result_specs,
    vary_as,
)


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
    r"""Computes attention and the largest logit of query and key, per head.

    $$\mathrm{softmax}(s\,QK^\top + \mathrm{bias})\,V \qquad\text{and}\qquad
      S_h = \max_{b,i,j} \; s\, q_{bih} \cdot k_{bjh}$$

    Output, gradient and statistic equal those of `jax.nn.dot_product_attention` and
    [`max_logits`][], but only one block of logits is in memory at once. The output is
    zero for a query that sees no key. Softmax and sums are in float32, or in float64 if
    an array is.

    **Arguments:**

    - `value`: `(batch..., key_length, key_heads, value_dim)`.
    - `block_size`: number of queries and of keys in a block. If a window with two ends
        (`is_causal` is one end) is no longer than a block, its logits are formed alone,
        without the other keys.
    - all others: as for [`max_logits`][].

    **Returns:** the output, `(batch..., length, heads, value_dim)` in the dtype of
    `value`, and the statistic, `(heads,)` float32 without gradient.

    **Raises:** `ValueError` if shapes do not fit, as for [`max_logits`][].

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

    ??? cite "References"

        Milakov and Gimelshein, "Online normalizer calculation for softmax",
        arXiv:1805.02867; Dao et al., "FlashAttention", arXiv:2205.14135.
    """
    size = check_whole_number("block_size", block_size, 1)
    ids = query_segment_ids, key_segment_ids
    window = make_window(is_causal, local_window_size)
    logits, (value,) = logits_and_values(
        query, key, [value], bias, mask, *ids, scale, window, size
    )
    logits = _by_window(logits)
    output, statistic = _attend_compiled(logits, value)
    return output, jax.lax.stop_gradient(statistic)


def _by_window(logits: Logits) -> Logits:
    """Sets the blocks so that a narrow window is formed at once, with few others."""
    before, after = logits.window
    if before is None or after is None or not 0 <= before + after <= logits.size:
        return logits
    # With blocks of queries as long as the window, half of the formed logits are seen.
    # Shorter blocks make products that are too small to be fast.
    size = min(logits.size, max(before + after, _LEAST_ROWS))
    return dataclasses.replace(logits, size=size, span=size + before + after)


# The derivative is written by hand. A loop that skips what a causal mask hides has a
# traced number of trips, and JAX does not differentiate it. Loops over all blocks
# under `jax.checkpoint` were 3 to 5 times slower: they go back through the running
# rows. Here the saved sum of a row gives the weights of any block at once.
@jax.custom_vjp
def _attend(logits: Logits, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _attend_forward(logits, value)[0]


# Forward and gradient enter automatic axes separately, so that the residuals between
# them are sharded like the caller's arrays.
def _attend_forward(logits: Logits, value: jax.Array):
    output, log_total, statistic = on_automatic_axes(
        _forward, logits, value, results=result_specs(logits.query)
    )
    return (output, statistic), (logits, value, output, log_total)


def _attend_backward(residuals, cotangents):
    logits, value, *_ = residuals
    arrays = (logits.query, logits.key, value, logits.bias, logits.scale)
    # The second cotangent, of the statistic, is zero because of its stop_gradient.
    d_query, d_key, d_value, d_bias, d_scale = on_automatic_axes(
        _gradient,
        *residuals,
        cotangents[0],
        results=jax.tree.map(explicit_spec, arrays),
    )
    of_logits = dataclasses.replace(
        jax.tree.map(lambda _: None, logits),
        query=d_query,
        key=d_key,
        bias=d_bias,
        scale=d_scale,
    )
    return of_logits, d_value


_attend.defvjp(_attend_forward, _attend_backward)

# Compiled, because an eager loop over new functions would compile at every call.
_attend_compiled = jax.jit(_attend)


#: The fewest queries in a block for a window.
_LEAST_ROWS = 128


class _RunningSoftmax(NamedTuple):
    """The running rows of a softmax times values."""

    largest: jax.Array  # (batch..., heads, rows)
    total: jax.Array  # of exp(logits - largest)
    output: jax.Array  # (batch..., heads, rows, value_dim), to be divided by total
    unbiased: jax.Array  # the largest logit without the bias


def _forward(logits: Logits, value: jax.Array):
    """Returns the output, the logarithm of the softmax's sum and the statistic."""
    *batch, queries, heads, _ = logits.query.shape
    put = jax.lax.dynamic_update_slice_in_dim

    # The last block overlaps queries that are done; they get the same result again.
    def attend(i: jax.Array, done):
        output, log_total, statistic = done
        row = _attend_row(logits, value, i)
        seen = row.total > 0
        block = row.output / jnp.where(seen, row.total, 1)[..., None]
        # One array in place of maximum and sum (FlashAttention-2, arXiv:2307.08691,
        # 3.1.1). Infinite if nothing is seen, so that the gradient's weights are zero.
        logs = jnp.where(seen, row.largest + jnp.log(row.total), jnp.inf)
        others = tuple(a for a in range(logs.ndim) if a != logs.ndim - 2)
        rows = keep_nan(row.unbiased, jnp.isnan(row.total))
        block = jnp.swapaxes(block, -3, -2).astype(output.dtype)
        return (
            put(output, block, i * logits.size, -3),
            put(log_total, logs, i * logits.size, -1),
            jnp.maximum(statistic, largest(rows, others)),
        )

    nothing = (
        jnp.zeros((*batch, queries, heads, value.shape[-1]), value.dtype),
        jnp.zeros((*batch, heads, queries), logits.scale.dtype),
        jnp.full(heads, -jnp.inf, logits.scale.dtype),
    )
    output, log_total, statistic = jax.lax.fori_loop(
        0, logits.blocks[0], attend, vary_as(nothing, logits)
    )
    return output, log_total, statistic.astype(jnp.float32)


def _attend_row(logits: Logits, value: jax.Array, i: jax.Array) -> _RunningSoftmax:
    """Returns the softmax of a block of queries over all keys that they see.

    Let `m` be the maximum and `l` the sum over the keys so far. A block with maximum
    `m'` and sum `l'` (of exponentials from `m'`) updates them to `max(m, m')` and
    `exp(m - max) l + exp(m' - max) l'` (arXiv:1805.02867, section 3.1). The output has
    the sum's recurrence. Without a bias the maximum is the statistic, at no cost.
    """
    *batch, queries, heads, _ = logits.query.shape

    def fold(j: jax.Array, running: _RunningSoftmax) -> _RunningSoftmax:
        formed = logits.of_block(i, j)
        values = logits.columns(value, j, axis=-3)
        highest = jnp.maximum(running.largest, formed.max(-1, initial=-jnp.inf))
        # A row that has seen nothing yet has no finite maximum to subtract: -inf minus
        # -inf is NaN.
        shift = jnp.where(jnp.isfinite(highest), highest, 0)
        unbiased = highest
        if logits.bias is not None:
            plain = logits.of_block(i, j, unbiased=True)  # XLA forms the product once
            unbiased = jnp.maximum(running.unbiased, plain.max(-1, initial=-jnp.inf))
        weights = jnp.exp(formed - shift[..., None])
        decay = jnp.exp(running.largest - shift)
        return _RunningSoftmax(
            highest,
            decay * running.total + weights.sum(-1),
            decay[..., None] * running.output + _weigh(weights, values),
            unbiased,
        )

    shape, dtype = (*batch, heads, min(queries, logits.size)), logits.scale.dtype
    nothing = _RunningSoftmax(
        jnp.full(shape, -jnp.inf, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, value.shape[-1]), dtype),
        jnp.full(shape, -jnp.inf, dtype),
    )
    return jax.lax.fori_loop(*logits.seen_by(i), fold, vary_as(nothing, logits))


def _gradient(
    logits: Logits,
    value: jax.Array,
    output: jax.Array,
    log_total: jax.Array,
    d_output: jax.Array,
) -> tuple[Any, ...]:
    """Returns the gradients of query, key, value, bias and scale.

    For weights `P = exp(S - log_total)` and the output `O = P V`,

        dV = P^T dO,   dP = dO V^T,   dS = P * (dP - mean),   mean = rowsum(dO * O)

    (arXiv:2205.14135, appendix B.2), block by block. `mean` is the sum of `P * dP` over
    all keys, and is known before the first block.
    """
    dtype, size, key_heads = logits.scale.dtype, logits.size, value.shape[-2]
    mean = jnp.sum(d_output.astype(dtype) * output.astype(dtype), axis=-1)
    mean = jnp.swapaxes(mean, -2, -1)
    d_output = d_output.astype(value.dtype)

    def fold_row(i: jax.Array, grads):
        start = i * size
        d_rows, means = logits.rows(d_output, i, axis=-3), logits.rows(mean, i, axis=-1)
        # The last block overlaps queries that are done; give them no weight.
        is_done = logits.rows(logits.query_positions, i, axis=-1) < start
        logs = logits.rows(log_total, i, axis=-1)
        logs = jnp.where(jnp.broadcast_to(is_done, logs.shape), jnp.inf, logs)

        def fold(j: jax.Array, grads):
            d_query, d_key, d_value, d_bias = grads
            key_start, block = logits.first_key(j), logits.block(i, j)
            values = logits.columns(value, j, axis=-3)
            weights = jnp.exp(logits.of_block(i, j) - logs[..., None])
            d_weights = product(d_rows, values, weights.dtype)
            d_logits = weights * (d_weights - means[..., None])
            if block.bias is not None:
                part = _sum_to(d_logits, block.bias.shape)
                d_bias = _add(d_bias, part, {-2: start, -1: key_start})
            d_queries = jnp.swapaxes(_weigh(d_logits, block.key), -3, -2)
            d_keys = _gather(d_logits, block.query, key_heads)
            d_values = _gather(weights, d_rows, key_heads)
            return (
                _add(d_query, d_queries, {-3: start}),
                _add(d_key, d_keys, {-3: key_start}),
                _add(d_value, d_values, {-3: key_start}),
                d_bias,
            )

        return jax.lax.fori_loop(*logits.seen_by(i), fold, grads)

    # In the dtype of the logits, because a row of d_key sums over all query blocks.
    arrays = (logits.query, logits.key, value, logits.bias)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), arrays)
    grads = jax.lax.fori_loop(0, logits.blocks[0], fold_row, vary_as(zeros, logits))
    # Multiply by the scale only here, since a row is smaller than its logits. The
    # scale's gradient is sum_ij dS_ij q_i k_j = sum_i q_i (sum_j dS_ij k_j).
    d_query, d_key, d_value, d_bias = grads
    d_scale = jnp.sum(d_query * logits.query.astype(dtype))
    grads = (logits.scale * d_query, logits.scale * d_key, d_value, d_bias)
    return *jax.tree.map(lambda g, x: g.astype(x.dtype), grads, arrays), d_scale


# Both products below round the weights to the other factor's dtype, as fused kernels
# do: matrix units are fast if both factors are bfloat16. Sums keep the weights' dtype.
def _weigh(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the weighted sums of the values, `(batch..., heads, length, dim)`."""
    summed = jnp.einsum(
        "...kgts,...skh->...kgth",
        grouped(weights, values.shape[-2], axis=-3).astype(values.dtype),
        values,
        preferred_element_type=weights.dtype,
    )
    return summed.reshape(*weights.shape[:-1], values.shape[-1])


def _gather(weights: jax.Array, rows: jax.Array, key_heads: int) -> jax.Array:
    """Returns weighted sums of query rows, `(batch..., key_length, key_heads, dim)`.

    Sums over the query heads that share a key (`g`), as the key's gradient does.
    """
    return jnp.einsum(
        "...kgts,...tkgh->...skh",
        grouped(weights, key_heads, axis=-3).astype(rows.dtype),
        grouped(rows, key_heads, axis=-2),
        preferred_element_type=weights.dtype,
    )


def _add(target: jax.Array, block: jax.Array, starts: dict[int, Any]) -> jax.Array:
    """Adds a block that begins at `starts`, by axis."""
    # JAX moves a block that would not fit: at the end, as `_block_of` did, and along an
    # axis of a bias that only broadcasts.
    indices = [starts.get(axis, 0) for axis in range(-target.ndim, 0)]
    old = jax.lax.dynamic_slice(target, indices, block.shape)
    return jax.lax.dynamic_update_slice(target, old + block, indices)


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums an array to `shape`: the transpose of broadcasting."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    spread = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(spread, keepdims=True)

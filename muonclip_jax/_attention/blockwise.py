"""Attention and its largest logits in one pass, in memory linear in the length.

The running softmax of Milakov and Gimelshein (arXiv:1805.02867) over blocks of keys;
the gradient recomputes the blocks (FlashAttention, arXiv:2205.14135).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._explicit_axes import explicit_spec, on_automatic_axes
from .._model.statistics import largest
from .arguments import logit_inputs
from .block_products import add, gather, product, put, weigh
from .logits import Blocks, cut, LogitInputs, make_blocks
from .mesh_axes import layout_of, vary_as


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
    zeros. Softmax and sums are in float32, and in float64 where an array has it.

    **Arguments:**

    - `value`: `(batch..., key_length, key_heads, value_dim)`.
    - `block_size`: queries and keys in a block.
    - all others: as for [`max_logits`][].

    **Returns:** the output, `(batch..., length, heads, value_dim)` in the dtype of
    `value`, and the statistic, `(heads,)` float32 without gradient.

    **Raises:** `ValueError` where shapes do not fit, as for [`max_logits`][].

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
    inputs, (value,) = logit_inputs(
        query, key, [value], bias, mask, query_segment_ids, key_segment_ids, scale
    )
    blocks = make_blocks(is_causal, local_window_size, block_size)
    results: Any = _attend(blocks, inputs, value)
    return results[0], jax.lax.stop_gradient(results[1])


# Compiled, since an eager call of a loop over new functions would compile it again.
@functools.partial(jax.jit, static_argnums=0)
def _attend(blocks: Blocks, inputs: LogitInputs, value: jax.Array) -> Any:
    return _attend_once(blocks, inputs, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_once(blocks: Blocks, inputs: LogitInputs, value: jax.Array) -> Any:
    return _attend_forward(blocks, inputs, value)[0]


def _attend_forward(blocks: Blocks, inputs: LogitInputs, value: jax.Array):
    forward = functools.partial(_forward, blocks)
    output, log_total, largest = on_automatic_axes(
        forward, inputs, value, results=tuple(layout_of(inputs.query))
    )
    return (output, largest), (inputs, value, output, log_total)


def _attend_backward(blocks: Blocks, residuals, cotangents):
    inputs, value, *_ = residuals
    gradient = functools.partial(_gradient, blocks)
    arrays = (inputs.query, inputs.key, value, inputs.bias, inputs.scale)
    d_query, d_key, d_value, d_bias, d_scale = on_automatic_axes(
        gradient,
        *residuals,
        cotangents[0],
        results=jax.tree.map(explicit_spec, arrays),
    )
    return LogitInputs(d_query, d_key, d_bias, *[None] * 5, d_scale), d_value  # pyright: ignore


_attend_once.defvjp(_attend_forward, _attend_backward)


class _Softmax(NamedTuple):
    """Running rows of a softmax times values."""

    largest: jax.Array  # (batch..., heads, rows)
    total: jax.Array  # of exp(logits - largest)
    output: jax.Array  # (batch..., heads, rows, value_dim), to be divided by total


def _forward(blocks: Blocks, inputs: LogitInputs, value: jax.Array):
    """Returns the output, the logarithm of the softmax's sum and the statistic."""
    *batch, queries, heads, _ = inputs.query.shape

    def attend(i: jax.Array, done):
        output, log_total, statistic = done
        row = _attend_row(blocks, inputs, value, i)
        seen = row.total > 0
        block = row.output / jnp.where(seen, row.total, 1)[..., None]
        # Infinite where nothing is seen: the gradient's weights are then zero.
        logs = jnp.where(seen, row.largest + jnp.log(row.total), jnp.inf)
        others = tuple(a for a in range(logs.ndim) if a != logs.ndim - 2)
        # A maximum over keys may lose a NaN, but the sum over them does not.
        rows = jnp.where(jnp.isnan(row.total), jnp.nan, row.largest)
        return (
            put(output, jnp.swapaxes(block, -3, -2), {-3: i * blocks.size}),
            put(log_total, logs, {-1: i * blocks.size}),
            jnp.maximum(statistic, largest(rows, others)),
        )

    nothing = (
        jnp.zeros((*batch, queries, heads, value.shape[-1]), value.dtype),
        jnp.zeros((*batch, heads, queries), inputs.scale.dtype),
        jnp.full(heads, -jnp.inf, inputs.scale.dtype),
    )
    done = vary_as(nothing, inputs)
    done = jax.lax.fori_loop(0, blocks.count(queries), attend, done)
    return done[0], done[1], done[2].astype(jnp.float32)


def _attend_row(
    blocks: Blocks, inputs: LogitInputs, value: jax.Array, i: jax.Array
) -> _Softmax:
    """The softmax of a block of queries over all the keys that they see."""
    *batch, queries, heads, _ = inputs.query.shape

    def fold(j: jax.Array, running: _Softmax) -> _Softmax:
        logits = blocks.logits(inputs, i, j)
        values = cut(value, j * blocks.size, value.shape[-3], blocks.size, axis=-3)
        highest = jnp.maximum(running.largest, logits.max(-1, initial=-jnp.inf))
        # A row that has seen nothing yet has no finite maximum to take off.
        shift = jnp.where(jnp.isfinite(highest), highest, 0)
        weights = jnp.exp(logits - shift[..., None])
        decay = jnp.exp(running.largest - shift)
        return _Softmax(
            highest,
            decay * running.total + weights.sum(-1),
            decay[..., None] * running.output + weigh(weights, values),
        )

    shape, dtype = (*batch, heads, min(queries, blocks.size)), inputs.scale.dtype
    nothing = _Softmax(
        jnp.full(shape, -jnp.inf, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, value.shape[-1]), dtype),
    )
    seen = blocks.seen_by(inputs, i)
    return jax.lax.fori_loop(*seen, fold, vary_as(nothing, inputs))


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


def _gradient(
    blocks: Blocks,
    inputs: LogitInputs,
    value: jax.Array,
    output: jax.Array,
    log_total: jax.Array,
    d_output: jax.Array,
) -> tuple[Any, ...]:
    """Returns the gradients of query, key, value, bias and scale."""
    dtype = inputs.scale.dtype
    mean = jnp.sum(d_output.astype(dtype) * output.astype(dtype), axis=-1)
    rows = _Rows(d_output.astype(value.dtype), jnp.swapaxes(mean, -2, -1), log_total)

    def fold_row(i: jax.Array, grads):
        row = rows.block(i * blocks.size, blocks.size)
        # The last block is moved in, onto queries that are done: no weight for them.
        start, length = i * blocks.size, mean.shape[-2]
        positions = cut(inputs.query_positions, start, length, blocks.size, axis=-1)
        is_done = jnp.broadcast_to(positions < start, row.log_total.shape)
        logs = jnp.where(is_done, jnp.inf, row.log_total)
        row = row._replace(log_total=logs)

        def fold(j: jax.Array, grads):
            return _add_block(blocks, inputs, value, row, i, j, grads)

        return jax.lax.fori_loop(*blocks.seen_by(inputs, i), fold, grads)

    arrays = (inputs.query, inputs.key, value, inputs.bias)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), arrays)
    grads = vary_as(zeros, inputs)
    grads = jax.lax.fori_loop(0, blocks.count(mean.shape[-2]), fold_row, grads)
    # So far without the scale: one product with a row in place of one with its logits.
    d_query, d_key, d_value, d_bias = grads
    d_scale = jnp.sum(d_query * inputs.query.astype(dtype))
    grads = (inputs.scale * d_query, inputs.scale * d_key, d_value, d_bias)
    return *jax.tree.map(lambda g, x: g.astype(x.dtype), grads, arrays), d_scale


def _add_block(blocks: Blocks, inputs: LogitInputs, value, row: _Rows, i, j, grads):
    """Adds what one block contributes to the gradients of query, key, value, bias."""
    i_start, j_start = i * blocks.size, j * blocks.size
    block = inputs.block(i_start, j_start, blocks.size)
    values = cut(value, j_start, value.shape[-3], blocks.size, axis=-3)
    weights = jnp.exp(blocks.logits(inputs, i, j) - row.log_total[..., None])
    d_weights = product(row.d_output, values, weights.dtype)
    d_logits = weights * (d_weights - row.mean[..., None])
    key_heads = value.shape[-2]
    d_query, d_key, d_value, d_bias = grads
    if block.bias is not None:
        part = _sum_to(d_logits, block.bias.shape)
        d_bias = add(d_bias, part, {-2: i_start, -1: j_start})
    return (
        add(d_query, jnp.swapaxes(weigh(d_logits, block.key), -3, -2), {-3: i_start}),
        add(d_key, gather(d_logits, block.query, key_heads), {-3: j_start}),
        add(d_value, gather(weights, row.d_output, key_heads), {-3: j_start}),
        d_bias,
    )


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes broadcasting from `shape`."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    spread = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(spread, keepdims=True)

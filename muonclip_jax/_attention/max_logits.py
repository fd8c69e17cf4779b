"""The largest logit of every head, in memory that grows with the length alone."""

import functools
import math

import jax
import jax.numpy as jnp

from .._axes import on_automatic_axes
from .._model.statistics import largest
from .logits import (
    Blocks,
    logit_inputs,
    LogitInputs,
    make_window,
    result_specs,
    vary_as,
)


# Up to this many pairs the logits are formed at once: XLA then shares them with an
# attention that forms them anyway. Beyond, blocks of its root are folded one by one.
# Either way at most 2**20 logits, 4 MiB in float32, of each head and example exist at a
# time.
_PAIRS_AT_ONCE = 1 << 20
_BLOCK = 1 << 10


def max_logits(
    query: jax.Array,
    key: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
) -> jax.Array:
    r"""The largest value that enters the softmax, per head.

    $$S_h = \max_{b,i,j} \; s\, q_{bih} \cdot k_{bjh} + \mathrm{bias}_{bhij}$$

    over the pairs that the mask shows. Long sequences are cut into blocks, so that
    memory does not grow with the square of the length.

    **Arguments:**

    - `query`: `(batch..., length, heads, head_dim)`, after any rotary embedding. Batch
        axes of query and key broadcast, as in NumPy.
    - `key`: `(batch..., key_length, key_heads, head_dim)`, where `key_heads` divides
        `heads`.
    - `bias`, `mask`: broadcast to `(batch..., heads, length, key_length)`; the mask is
        true (or nonzero) where a query sees a key.
    - `is_causal`: whether a query sees no later key.
    - `scale`: one number, traced or not; `1/sqrt(head_dim)` by default.
    - `local_window_size`: how many keys before and after itself a query sees, as in
        `jax.nn.dot_product_attention`.
    - `query_segment_ids`, `key_segment_ids`: integers that broadcast to
        `(batch..., length)`; a query sees keys of its own segment. Left out, those of
        the keys are the query's.

    **Returns:** `(heads,)` float32, without gradient; `-inf` for a head that sees
    nothing, NaN if one of the values is.

    **Raises:** `ValueError` where heads or sizes of query and key do not fit, where a
    bias, a mask or segments do not broadcast, and for the segments of keys alone.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.max_logits(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)))
        Array([2., 2.], dtype=float32)

    ??? cite "References"

        Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1.
    """
    inputs, _ = logit_inputs(
        query, key, [], bias, mask, query_segment_ids, key_segment_ids, scale
    )
    lengths = inputs.query.shape[-3], inputs.key.shape[-3]
    size = max(*lengths, 1) if math.prod(lengths) <= _PAIRS_AT_ONCE else _BLOCK
    window = make_window(is_causal, local_window_size)
    return _statistic(Blocks(window, size), inputs)


def max_logits_at_once(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
) -> jax.Array:
    """The statistic for an attention that forms all logits: XLA forms them once."""
    inputs, _ = logit_inputs(query, key, [], bias, mask, None, None, None)
    size = max(inputs.query.shape[-3], inputs.key.shape[-3], 1)
    return _statistic(Blocks(make_window(is_causal, None), size), inputs)


# Compiled, since an eager call of a loop over new functions would compile it again.
@functools.partial(jax.jit, static_argnums=0)
def _statistic(blocks: Blocks, inputs: LogitInputs) -> jax.Array:
    # The statistic decides how weights are scaled after the step and is no part of the
    # loss. Stopped at the inputs, and not at the result, it keeps no logits for a
    # backward pass, and JAX need not differentiate a loop of a traced number of trips.
    inputs = jax.lax.stop_gradient(inputs)
    *_, statistic = result_specs(inputs.query)
    at_once = max(inputs.query.shape[-3], inputs.key.shape[-3]) <= blocks.size
    find = functools.partial(_largest if at_once else _fold_blocks, blocks)
    return on_automatic_axes(find, inputs, results=statistic)


def _largest(blocks: Blocks, inputs: LogitInputs) -> jax.Array:
    logits = inputs.logits(blocks.window)
    others = tuple(axis for axis in range(logits.ndim) if axis != logits.ndim - 3)
    return largest(logits, others).astype(jnp.float32)


def _fold_blocks(blocks: Blocks, inputs: LogitInputs) -> jax.Array:
    """The running maximum over blocks; those at the end overlap, which does no harm.

    This is blockwise attention without its exponentials, values and gradient.
    """
    *_, queries, heads, _ = inputs.query.shape

    def fold_row(i: jax.Array, running: jax.Array) -> jax.Array:
        def fold(j: jax.Array, running: jax.Array) -> jax.Array:
            block = inputs.block(i * blocks.size, j * blocks.size, blocks.size)
            # Unlike XLA's reduction, this maximum of two keeps a NaN on CPU.
            return jnp.maximum(running, _largest(blocks, block))

        return jax.lax.fori_loop(*blocks.seen_by(inputs, i), fold, running)

    nothing = vary_as(jnp.full(heads, -jnp.inf, jnp.float32), inputs)
    return jax.lax.fori_loop(0, blocks.count(queries), fold_row, nothing)

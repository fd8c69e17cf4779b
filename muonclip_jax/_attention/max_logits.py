"""The largest logit of every head, in memory that grows with the length alone."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._explicit_axes import on_automatic_axes
from .._model.statistics import largest
from .arguments import logit_inputs
from .logits import Blocks, LogitInputs, make_blocks
from .mesh_axes import layout_of, vary_as


# Up to this many pairs the logits are formed at once: XLA then shares them with an
# attention that forms them anyway. Beyond, blocks of its root are folded one by one.
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

    over the pairs that the mask shows. Long sequences are taken in blocks, so that
    memory does not grow with the square of the length.

    **Arguments:**

    - `query`: `(batch..., length, heads, head_dim)`, after any rotary embedding.
    - `key`: `(batch..., key_length, key_heads, head_dim)`, where `key_heads` divides
        `heads`.
    - `bias`, `mask`: broadcast to `(batch..., heads, length, key_length)`; the mask is
        true (or nonzero) where a query sees a key.
    - `is_causal`: whether a query sees no later key.
    - `scale`: one number, traced or not; `1/sqrt(head_dim)` by default.
    - `local_window_size`: how many keys before and after itself a query sees, as in
        `jax.nn.dot_product_attention`.
    - `query_segment_ids`, `key_segment_ids`: integers that broadcast to
        `(batch..., length)`; a query sees keys of its own segment. Keys take the
        query's if left out.

    **Returns:** `(heads,)` float32, without gradient; `-inf` for a head that sees
    nothing, NaN if one of the values is.

    Batch axes of query and key broadcast, as in NumPy.

    **Raises:** `ValueError` where heads or sizes of query and key do not fit, where a
    bias, a mask or segments do not broadcast, and for the segments of keys alone.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.max_logits(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)))
        Array([2., 2.], dtype=float32)
    """
    inputs, _ = logit_inputs(
        query, key, [], bias, mask, query_segment_ids, key_segment_ids, scale
    )
    blocks = make_blocks(is_causal, local_window_size, _BLOCK)
    at_once = inputs.query.shape[-3] * inputs.key.shape[-3] <= _PAIRS_AT_ONCE
    return _statistic(_largest if at_once else _fold_blocks, blocks, inputs)


def max_logits_at_once(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
) -> jax.Array:
    """For an attention that forms all logits anyway: XLA then forms them once."""
    inputs, _ = logit_inputs(query, key, [], bias, mask, None, None, None)
    return _statistic(_largest, make_blocks(is_causal, None, _BLOCK), inputs)


# Compiled, since an eager call of a loop over new functions would compile it again.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _statistic(find: Callable, blocks: Blocks, inputs: LogitInputs) -> jax.Array:
    inputs = jax.lax.stop_gradient(inputs)
    function = functools.partial(find, blocks)
    results = layout_of(inputs.query).statistic
    return on_automatic_axes(function, inputs, results=results)


def _largest(blocks: Blocks, inputs: LogitInputs) -> jax.Array:
    logits = inputs.logits(blocks.window)
    others = tuple(axis for axis in range(logits.ndim) if axis != logits.ndim - 3)
    return largest(logits, others).astype(jnp.float32)


def _fold_blocks(blocks: Blocks, inputs: LogitInputs) -> jax.Array:
    """The running maximum over blocks; those at the end overlap, which does no harm."""
    *_, queries, heads, _ = inputs.query.shape

    def fold_row(i: jax.Array, running: jax.Array) -> jax.Array:
        def fold(j: jax.Array, running: jax.Array) -> jax.Array:
            block = inputs.block(i * blocks.size, j * blocks.size, blocks.size)
            return jnp.maximum(running, _largest(blocks, block))

        return jax.lax.fori_loop(*blocks.seen_by(inputs, i), fold, running)

    nothing = vary_as(jnp.full(heads, -jnp.inf, jnp.float32), inputs)
    return jax.lax.fori_loop(0, blocks.count(queries), fold_row, nothing)

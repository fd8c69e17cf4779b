"""Computes the largest logit of each head, in memory linear in the length."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from .._mesh_axes import on_automatic_axes
from .._model.statistics import largest
from .logits import Logits, logits_and_values, make_window, result_specs, vary_as


# Up to this many pairs, all logits are formed at once, and XLA shares them with an
# attention that forms them anyway. Beyond it, blocks of its root are folded one by one.
# Either way at most 2**20 logits, 4 MiB in float32, per head and example exist at once.
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
    r"""Returns the largest logit of query and key, per head.

    $$S_h = \max_{b,i,j} \; s\, q_{bih} \cdot k_{bjh}$$

    over the visible pairs, without the bias, which QK-Clip cannot scale. Long sequences
    are processed in blocks, so memory does not grow with the square of the length.

    **Arguments:**

    - `query`: `(batch..., length, heads, head_dim)`, after any rotary embedding. Batch
        axes of query and key broadcast, as in NumPy.
    - `key`: `(batch..., key_length, key_heads, head_dim)`, where `key_heads` divides
        `heads`.
    - `bias`: broadcasts to `(batch..., heads, length, key_length)`. An entry of -9,900
        or less hides its pair, as in additive masks; a single number hides no pair.
    - `mask`: broadcasts like `bias`; true (or nonzero) where a query sees a key.
    - `is_causal`: whether later keys are hidden from a query.
    - `scale`: one number, traced or not; `1/sqrt(head_dim)` by default.
    - `local_window_size`: how many keys before and after itself a query sees, as in
        `jax.nn.dot_product_attention`.
    - `query_segment_ids`: integers that broadcast to `(batch..., length)`; a query sees
        keys of its own segment.
    - `key_segment_ids`: segments of the keys; default: the query's.

    **Returns:** `(heads,)` float32, without gradient; `-inf` for a head that sees no
    pair, NaN if a logit is NaN.

    **Raises:** `ValueError` if heads or sizes of query and key do not fit, if a bias, a
    mask or segments do not broadcast, and if only the keys have segments.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.max_logits(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)))
        Array([2., 2.], dtype=float32)

    ??? cite "References"

        Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1.
    """
    window = make_window(is_causal, local_window_size)
    logits, _ = logits_and_values(
        query, key, [], bias, mask, query_segment_ids, key_segment_ids, scale, window
    )
    return statistic(in_blocks(logits))


def in_blocks(logits: Logits) -> Logits:
    """Returns the same logits, set to be formed in blocks if there are many pairs."""
    if math.prod(logits.lengths) <= _PAIRS_AT_ONCE:
        return logits
    return dataclasses.replace(logits, size=_BLOCK)


# Compiled, because an eager loop over new functions would compile at every call.
@jax.jit
def statistic(logits: Logits) -> jax.Array:
    """Returns the largest logit of each head, `(heads,)` float32."""
    # The statistic is not part of the loss. Stop the gradient at the inputs and not at
    # the result: then no logits are kept for a backward pass, and JAX need not
    # differentiate a loop with a traced number of trips.
    logits = jax.lax.stop_gradient(logits)
    *_, spec = result_specs(logits.query)
    is_one = max(logits.lengths) <= logits.size
    return on_automatic_axes(_largest if is_one else _fold, logits, results=spec)


def _largest(logits: Logits) -> jax.Array:
    formed = logits.unbiased.form()
    others = tuple(axis for axis in range(formed.ndim) if axis != formed.ndim - 3)
    return largest(formed, others).astype(jnp.float32)


def _fold(logits: Logits) -> jax.Array:
    """Returns the maximum over blocks; at the end they overlap, which is harmless.

    This is blockwise attention without its exponentials, values and gradient.
    """

    def fold_row(i: jax.Array, running: jax.Array) -> jax.Array:
        def fold(j: jax.Array, running: jax.Array) -> jax.Array:
            return jnp.maximum(running, _largest(logits.block(i, j)))

        return jax.lax.fori_loop(*logits.seen_by(i), fold, running)

    nothing = jnp.full(logits.query.shape[-2], -jnp.inf, jnp.float32)
    return jax.lax.fori_loop(0, logits.blocks[0], fold_row, vary_as(nothing, logits))

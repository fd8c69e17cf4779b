"""The largest logit of every head, in memory that grows with the length alone."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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
    - `scale`: `1/sqrt(head_dim)` by default.
    - `local_window_size`: how many keys before and after itself a query sees, as in
        `jax.nn.dot_product_attention`.
    - `query_segment_ids`, `key_segment_ids`: `(batch..., length)` integers; a query
        sees keys of its own segment. Keys take the query's if left out.

    **Returns:** `(heads,)` float32, without gradient; `-inf` for a head that sees
    nothing.

    **Raises:** `ValueError` where heads or sizes of query and key do not fit.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.max_logits(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)))
        Array([2., 2.], dtype=float32)
    """
    heads, key_heads, depth = query.shape[-2], key.shape[-2], query.shape[-1]
    if heads % key_heads or depth != key.shape[-1]:
        raise ValueError(
            f"query {query.shape} and key {key.shape} do not fit: key heads must "
            "divide query heads and both need the same head_dim"
        )
    if key_segment_ids is None:
        key_segment_ids = query_segment_ids
    whole = _Pairs(
        *jax.lax.stop_gradient((query, key, bias)),
        None if mask is None else jnp.asarray(mask, bool),
        query_segment_ids,
        key_segment_ids,
        jnp.arange(query.shape[-3]),
        jnp.arange(key.shape[-3]),
    )
    largest = functools.partial(
        _largest,
        scale=depth**-0.5 if scale is None else scale,
        window=_window(is_causal, local_window_size),
    )
    if query.shape[-3] * key.shape[-3] <= _PAIRS_AT_ONCE:
        return largest(whole)
    return _fold_blocks(largest, whole, heads)


class _Pairs(NamedTuple):
    """Queries and keys, all of them or a block, with what decides who sees whom."""

    query: jax.Array
    key: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    query_segments: jax.Array | None
    key_segments: jax.Array | None
    query_positions: jax.Array
    key_positions: jax.Array

    def block(self, i: jax.Array, j: jax.Array) -> "_Pairs":
        rows = functools.partial(_cut, start=i, length=self.query.shape[-3])
        columns = functools.partial(_cut, start=j, length=self.key.shape[-3])
        return _Pairs(
            rows(self.query, axis=-3),
            columns(self.key, axis=-3),
            rows(columns(self.bias, axis=-1), axis=-2),
            rows(columns(self.mask, axis=-1), axis=-2),
            rows(self.query_segments, axis=-1),
            columns(self.key_segments, axis=-1),
            rows(self.query_positions, axis=-1),
            columns(self.key_positions, axis=-1),
        )


def _largest(pairs: _Pairs, *, scale: float, window: tuple[int | None, int | None]):
    logits = _product(pairs.query, pairs.key) * scale
    if pairs.bias is not None:
        logits = logits + pairs.bias
    for visible in _visible(pairs, window):
        logits = jnp.where(visible, logits, -jnp.inf)
    others = tuple(axis for axis in range(logits.ndim) if axis != logits.ndim - 3)
    return jnp.max(logits, axis=others, initial=-jnp.inf).astype(jnp.float32)


def _visible(pairs: _Pairs, window) -> Iterator[jax.Array]:
    """Masks, each broadcast against `(batch..., heads, length, key_length)`."""
    if pairs.mask is not None:
        yield pairs.mask
    ahead = pairs.key_positions - pairs.query_positions[:, None]
    before, after = window
    if before is not None:
        yield ahead >= -before
    if after is not None:
        yield ahead <= after
    if pairs.query_segments is not None and pairs.key_segments is not None:
        same = pairs.query_segments[..., :, None] == pairs.key_segments[..., None, :]
        yield same[..., None, :, :]


def _product(query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns `(batch..., heads, length, key_length)` in float32."""
    heads, key_heads = query.shape[-2], key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, -1)
    # Spelled as in jax.nn.dot_product_attention, so that XLA computes both once.
    product = functools.partial(
        jnp.einsum, "...tnh,...snh->...nts", preferred_element_type=jnp.float32
    )
    logits = jax.vmap(lambda q: product(q, key), in_axes=-2, out_axes=-3)(grouped)
    return logits.reshape(*query.shape[:-3], heads, *logits.shape[-2:])


def _fold_blocks(
    largest: Callable[[_Pairs], jax.Array], pairs: _Pairs, heads: int
) -> jax.Array:
    """The running maximum over blocks; those at the end overlap, which does no harm."""
    rows = -(-pairs.query.shape[-3] // _BLOCK)
    columns = -(-pairs.key.shape[-3] // _BLOCK)

    def fold(index: jax.Array, running: jax.Array) -> jax.Array:
        i, j = _BLOCK * (index // columns), _BLOCK * (index % columns)
        return jnp.maximum(running, largest(pairs.block(i, j)))

    start = jnp.full((heads,), -jnp.inf, jnp.float32)
    return jax.lax.fori_loop(0, rows * columns, fold, start)


def _cut(x: Any, start: jax.Array, length: int, *, axis: int) -> Any:
    """One block along an axis; an axis that only broadcasts stays."""
    if x is None or x.ndim < -axis or x.shape[axis] != length or length <= _BLOCK:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, _BLOCK, axis % x.ndim)


def _window(is_causal: bool, local: int | tuple[int, int] | None):
    before, after = (local, local) if local is None or isinstance(local, int) else local
    return before, 0 if is_causal else after

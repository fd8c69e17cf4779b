"""Queries and keys, who of them sees whom, and the logits of a block of them."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


#: How many keys a query sees before and after itself; `None` for all.
Window = tuple[int | None, int | None]


class Pairs(NamedTuple):
    """All queries and keys, or a block of them, with what decides who sees whom."""

    query: jax.Array  # (batch..., length, heads, head_dim)
    key: jax.Array  # (batch..., key_length, key_heads, head_dim)
    bias: jax.Array | None
    mask: jax.Array | None
    query_segments: jax.Array | None
    key_segments: jax.Array | None
    query_positions: jax.Array
    key_positions: jax.Array

    def block(self, i: jax.Array, j: jax.Array, size: int) -> "Pairs":
        """The pairs from query `i` and key `j` on; at the ends blocks are moved in."""
        rows = functools.partial(cut, start=i, length=self.query.shape[-3], size=size)
        columns = functools.partial(cut, start=j, length=self.key.shape[-3], size=size)
        return Pairs(
            rows(self.query, axis=-3),
            columns(self.key, axis=-3),
            rows(columns(self.bias, axis=-1), axis=-2),
            rows(columns(self.mask, axis=-1), axis=-2),
            rows(self.query_segments, axis=-1),
            columns(self.key_segments, axis=-1),
            rows(self.query_positions, axis=-1),
            columns(self.key_positions, axis=-1),
        )

    def logits(self, scale: float, window: Window) -> jax.Array:
        """What enters the softmax, `(batch..., heads, length, key_length)` float32."""
        logits = product(self.query, self.key) * scale
        if self.bias is not None:
            logits = logits + self.bias
        for visible in self._visible(window):
            logits = jnp.where(visible, logits, -jnp.inf)
        return logits

    def _visible(self, window: Window) -> Iterator[jax.Array]:
        """Masks, each broadcast against `(batch..., heads, length, key_length)`."""
        if self.mask is not None:
            yield self.mask
        ahead = self.key_positions - self.query_positions[:, None]
        before, after = window
        if before is not None:
            yield ahead >= -before
        if after is not None:
            yield ahead <= after
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[..., :, None] == self.key_segments[..., None, :]
            yield same[..., None, :, :]


def make_pairs(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_segment_ids: jax.Array | None,
    key_segment_ids: jax.Array | None,
) -> Pairs:
    """Raises `ValueError` where heads or sizes of query and key do not fit."""
    if query.shape[-2] % key.shape[-2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query {query.shape} and key {key.shape} do not fit: key heads must "
            "divide query heads and both need the same head_dim"
        )
    if key_segment_ids is None:
        key_segment_ids = query_segment_ids
    return Pairs(
        query,
        key,
        bias,
        None if mask is None else jnp.asarray(mask, bool),
        query_segment_ids,
        key_segment_ids,
        jnp.arange(query.shape[-3]),
        jnp.arange(key.shape[-3]),
    )


def make_window(is_causal: bool, local: int | tuple[int, int] | None) -> Window:
    before, after = (local, local) if local is None or isinstance(local, int) else local
    return before, 0 if is_causal else after


def cut(x: Any, start: jax.Array, length: int, size: int, *, axis: int) -> Any:
    """One block along an axis; an axis that only broadcasts stays."""
    if x is None or x.ndim < -axis or x.shape[axis] != length or length <= size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis % x.ndim)


def product(query: jax.Array, key: jax.Array) -> jax.Array:
    """All inner products, `(batch..., heads, length, key_length)` float32."""
    heads, key_heads = query.shape[-2], key.shape[-2]
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, -1)
    # Spelled as in jax.nn.dot_product_attention, so that XLA computes both once.
    einsum = functools.partial(
        jnp.einsum, "...tnh,...snh->...nts", preferred_element_type=jnp.float32
    )
    logits = jax.vmap(lambda q: einsum(q, key), in_axes=-2, out_axes=-3)(grouped)
    return logits.reshape(*query.shape[:-3], heads, *logits.shape[-2:])

"""What enters the softmax: queries and keys, their mask, and logits by block."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._options import whole_number
from .block_products import product
from .windows import make_window, Window


class LogitInputs(NamedTuple):
    """All queries and keys, or a block of them, with what decides who sees whom."""

    query: jax.Array  # (batch..., length, heads, head_dim)
    key: jax.Array  # (batch..., key_length, key_heads, head_dim)
    bias: jax.Array | None
    mask: jax.Array | None
    query_segments: jax.Array | None
    key_segments: jax.Array | None
    query_positions: jax.Array
    key_positions: jax.Array
    scale: jax.Array  # in the dtype of the logits

    def block(self, i: jax.Array, j: jax.Array, size: int) -> "LogitInputs":
        """The inputs from query `i` and key `j` on; at the ends blocks are moved in."""
        rows = functools.partial(cut, start=i, length=self.query.shape[-3], size=size)
        columns = functools.partial(cut, start=j, length=self.key.shape[-3], size=size)
        return LogitInputs(
            rows(self.query, axis=-3),
            columns(self.key, axis=-3),
            rows(columns(self.bias, axis=-1), axis=-2),
            rows(columns(self.mask, axis=-1), axis=-2),
            rows(self.query_segments, axis=-1),
            columns(self.key_segments, axis=-1),
            rows(self.query_positions, axis=-1),
            columns(self.key_positions, axis=-1),
            self.scale,
        )

    def logits(self, window: Window) -> jax.Array:
        """What enters the softmax, `(batch..., heads, length, key_length)`."""
        logits = product(self.query, self.key, self.scale.dtype) * self.scale
        if self.bias is not None:
            bias = self.bias.astype(logits.dtype)
            logits = logits + jnp.broadcast_to(bias, logits.shape)
        for visible in self._visible(window):
            visible = jnp.broadcast_to(visible, logits.shape)
            logits = jnp.where(visible, logits, -jnp.inf)
        return logits

    def _visible(self, window: Window) -> Iterator[jax.Array]:
        """Masks, each broadcast against `(batch..., heads, length, key_length)`."""
        if self.mask is not None:
            yield self.mask
        ahead = self.key_positions[None, :] - self.query_positions[:, None]
        before, after = window
        if before is not None:
            yield ahead >= -before
        if after is not None:
            yield ahead <= after
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[..., :, None] == self.key_segments[..., None, :]
            yield same[..., None, :, :]


class Blocks(NamedTuple):
    """What is known of the logits at compile time, and how they are cut into blocks."""

    window: Window
    size: int

    def count(self, length: int) -> int:
        return -(-length // self.size)

    def logits(self, inputs: LogitInputs, i: jax.Array, j: jax.Array) -> jax.Array:
        """Those of a block, every key in one block only.

        The last block is moved in to fit, onto keys that the one before it has.
        """
        block = inputs.block(i * self.size, j * self.size, self.size)
        logits = block.logits(self.window)
        is_done = block.key_positions < j * self.size
        return jnp.where(jnp.broadcast_to(is_done, logits.shape), -jnp.inf, logits)

    def seen_by(self, inputs: LogitInputs, i: jax.Array) -> tuple[Any, Any]:
        """The range of the key blocks that block `i` of the queries sees."""
        queries, keys = inputs.query.shape[-3], inputs.key.shape[-3]
        rows = min(queries, self.size)
        start = jnp.minimum(i * self.size, queries - rows)
        before, after = self.window
        first, last = 0, self.count(keys)
        if before is not None:
            first = jnp.maximum(first, (start - before) // self.size)
        if after is not None:
            last = jnp.minimum(last, (start + rows - 1 + after) // self.size + 1)
        return first, last


def make_blocks(is_causal: bool, local_window_size: Any, size: Any) -> Blocks:
    window = make_window(is_causal, local_window_size)
    return Blocks(window, whole_number("block_size", size, 1))


def cut(x: Any, start: jax.Array, length: int, size: int, *, axis: int) -> Any:
    """One block along an axis; an axis that only broadcasts stays."""
    if x is None or x.ndim < -axis or x.shape[axis] != length or length <= size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis % x.ndim)

"""The logits that enter the softmax: checked arguments, visibility, blocks.

Each kernel of this package starts here. `fitting` checks shapes. `Logits` hold all that
decides which query sees which key, and form the logits at once or block by block.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from .._mesh_axes import explicit_spec, manual_axes, varying
from .._options import (
    check_array,
    check_flag,
    check_number,
    check_whole_number,
    FINITE,
    FLOATS,
)


#: How many keys a query sees before and after itself; `None` for all.
Window = tuple[int | None, int | None]

# A bias of at most this hides its pair. Many masks add -1e4, which is -9984 in
# bfloat16, and one array may hold a mask and a bias.
_HIDES = -9900.0

# More keys than any sequence has; sums with a position still fit 32-bit integers.
_ALL = 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logits:
    """Logits before they are formed: queries, keys, and which query sees which key.

    They cover all queries and keys, or a block of `size` queries and `size` keys. With
    a `span`, a block of queries has one block of `span` keys, numbered by the first.
    """

    query: jax.Array  # (batch..., length, heads, head_dim)
    key: jax.Array  # (batch..., key_length, key_heads, head_dim)
    bias: jax.Array | None  # broadcasts to (batch..., heads, length, key_length)
    mask: jax.Array | None  # likewise
    query_segments: jax.Array | None  # (batch..., length)
    key_segments: jax.Array | None  # (batch..., key_length)
    query_positions: jax.Array  # (length,), stored since a block has no offset
    key_positions: jax.Array  # (key_length,)
    scale: jax.Array  # in the dtype of the logits
    window: Window = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    span: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query.shape[-3], self.key.shape[-3]

    @property
    def blocks(self) -> tuple[int, int]:
        """Returns the numbers of blocks of queries and of keys."""
        queries, keys = self.lengths
        return -(-queries // self.size), -(-keys // self.size)

    def rows(self, x: Any, i: jax.Array, *, axis: int) -> Any:
        """Returns a block along an axis of queries; the last one is moved to fit."""
        return _block_of(x, i * self.size, self.lengths[0], self.size, axis)

    def columns(self, x: Any, j: jax.Array, *, axis: int) -> Any:
        """Returns a block along an axis of keys."""
        size = self.size if self.span is None else self.span
        return _block_of(x, self.first_key(j), self.lengths[1], size, axis)

    def first_key(self, j: jax.Array) -> jax.Array:
        return j * self.size if self.span is None else j

    @property
    def unbiased(self) -> "Logits":
        """Returns the logits without the bias; its hidden pairs stay hidden."""
        bias = None if self.bias is None else without_bias(self.bias)
        return dataclasses.replace(self, bias=bias)

    def block(self, i: jax.Array, j: jax.Array) -> "Logits":
        """Returns the logits of block `i` of the queries and `j` of the keys."""
        return dataclasses.replace(
            self,
            query=self.rows(self.query, i, axis=-3),
            key=self.columns(self.key, j, axis=-3),
            bias=self.rows(self.columns(self.bias, j, axis=-1), i, axis=-2),
            mask=self.rows(self.columns(self.mask, j, axis=-1), i, axis=-2),
            query_segments=self.rows(self.query_segments, i, axis=-1),
            key_segments=self.columns(self.key_segments, j, axis=-1),
            query_positions=self.rows(self.query_positions, i, axis=-1),
            key_positions=self.columns(self.key_positions, j, axis=-1),
        )

    def form(self) -> jax.Array:
        """Returns the input of the softmax, `(batch..., heads, length, key_length)`.

        Query and key already have positional embeddings. There is no soft cap, because
        logits before a cap still grow (arXiv:2507.20534, section 2.1).
        """
        # Scale after the product: in bfloat16 a scaled query would be rounded again.
        logits = product(self.query, self.key, self.scale.dtype) * self.scale
        if self.bias is not None:
            bias = self.bias.astype(logits.dtype)
            logits = logits + jnp.broadcast_to(bias, logits.shape)
        visible = [] if self.mask is None else [self.mask]
        # Compare the window here: a mask from the caller would take length x key_length
        # of memory.
        ahead = self.key_positions[None, :] - self.query_positions[:, None]
        before, after = self.window
        if before is not None:
            visible.append(ahead >= -before)
        if after is not None:
            visible.append(ahead <= after)
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[..., :, None] == self.key_segments[..., None, :]
            visible.append(same[..., None, :, :])
        # Not a large negative number, as in jax.nn: it would be the largest logit of a
        # head that sees nothing.
        for shown in visible:
            shown = jnp.broadcast_to(shown, logits.shape)
            logits = jnp.where(shown, logits, -jnp.inf)
        return logits

    def of_block(
        self, i: jax.Array, j: jax.Array, *, unbiased: bool = False
    ) -> jax.Array:
        """Returns the logits of a block, with each key in one block only.

        The last block is moved to fit, so it overlaps the block before it.
        """
        block = self.block(i, j)
        logits = (block.unbiased if unbiased else block).form()
        is_done = block.key_positions < self.first_key(j)
        return jnp.where(jnp.broadcast_to(is_done, logits.shape), -jnp.inf, logits)

    def seen_by(self, i: jax.Array) -> tuple[Any, Any]:
        """Returns the range of key blocks that block `i` of the queries sees.

        This halves the work of a causal mask. Mask arrays do not narrow the range,
        because their values are known only at run time.
        """
        queries, _ = self.lengths
        rows = min(queries, self.size)
        # The last block is moved to fit, so it starts earlier than `i * size`.
        start = jnp.minimum(i * self.size, queries - rows)
        before, after = self.window
        first, last = 0, self.blocks[1]
        if self.span is not None and before is not None:
            first = jnp.maximum(start - before, 0)
            return first, first + 1
        if before is not None:
            first = jnp.maximum(first, (start - before) // self.size)
        if after is not None:
            last = jnp.minimum(last, (start + rows - 1 + after) // self.size + 1)
        return first, last


def without_bias(bias: jax.Array, sign: int = 1) -> jax.Array:
    """Returns zeros in place of a bias, but infinity where it hides a pair.

    A NaN stays. `sign` is -1 for a bias that is subtracted. A single number for all
    pairs hides no pair.
    """
    hides = (sign * bias <= _HIDES) & (jnp.ndim(bias) > 0)
    return jnp.where(hides, -sign * jnp.inf, jnp.where(jnp.isnan(bias), bias, 0))


def logits_and_values(
    query: jax.Array,
    key: jax.Array,
    values: Sequence[jax.Array],
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_segment_ids: jax.Array | None,
    key_segment_ids: jax.Array | None,
    scale: float | jax.Array | None,
    window: Window,
    size: int | None = None,
) -> tuple[Logits, list[jax.Array]]:
    """Returns logits and values with one batch shape; `ValueError` if they do not fit.

    Without a `size` there is a single block.
    """
    shape, (query, key, *arrays) = fitting(query, key, *values)
    # Logits are in float32 for all short dtypes, as in jax.nn. bfloat16 has 8 bits: it
    # would round a logit near 100 by up to 0.25, and its exponential by a quarter.
    is_double = any(x.dtype == jnp.float64 for x in (query, key, *arrays))
    dtype = jnp.dtype(jnp.float64 if is_double else jnp.float32)
    logits = Logits(
        query,
        key,
        broadcasting("bias", bias, shape),
        broadcasting("mask", mask, shape, bool),
        *segments(query_segment_ids, key_segment_ids, shape),
        jnp.arange(shape[-2]),
        jnp.arange(shape[-1]),
        scalar(scale, query.shape[-1], dtype),
        window=window,
        size=max(*shape[-2:], 1) if size is None else size,
    )
    return vary_as((logits, arrays), (logits, arrays))


def fitting(
    query: jax.Array, key: jax.Array, *values: jax.Array
) -> tuple[tuple[int, ...], list[jax.Array]]:
    """Returns the shape of the logits, and all arrays with its batch axes."""
    given = zip(("query", "key", "value"), (query, key, *values), strict=False)
    named = [(name, check_array(name, x)) for name, x in given]
    arrays = [x for _, x in named]
    query, key = arrays[:2]
    shapes = ", ".join(f"{name} {x.shape}" for name, x in named)
    if min(x.ndim for x in arrays) < 3:
        raise ValueError(f"{shapes}: each needs axes (batch..., length, heads, dim)")
    if not all(x.dtype.name in FLOATS for x in arrays):
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in named)
        raise ValueError(f"{dtypes}: each needs a floating-point dtype")
    *_, length, heads, depth = query.shape
    *_, key_length, key_heads, key_depth = key.shape
    divides = heads % key_heads == 0 if key_heads else heads == 0
    if depth != key_depth or not divides:
        raise ValueError(
            f"query {query.shape} and key {key.shape} do not fit: key heads must "
            "divide query heads and both need the same head_dim"
        )
    for value in arrays[2:]:
        if value.shape[-3:-1] != key.shape[-3:-1]:
            raise ValueError(f"key {key.shape} and value {value.shape} do not fit")
    try:
        batch = jnp.broadcast_shapes(*(x.shape[:-3] for x in arrays))
    except ValueError:
        raise ValueError(f"{shapes}: their batch axes do not fit") from None
    spread = [jnp.broadcast_to(x, (*batch, *x.shape[-3:])) for x in arrays]
    return (*batch, heads, length, key_length), spread


def broadcasting(
    name: str,
    x: Any,
    shape: tuple[int, ...],
    dtype: Any = None,
    target: str = "the logits {}, (batch..., heads, length, key_length)",
) -> Any:
    """Checks that an array broadcasts to `shape`; returns it without broadcasting."""
    if x is None:
        return None
    x = check_array(name, x, real=True)
    if name == "bias" and x.dtype == bool:
        raise ValueError("bias has bools, and is added to the logits: they are a mask")
    # A mask of zeros and large negative numbers would hide what it means to show.
    # Traced, it has no values yet.
    is_known = dtype is bool and x.dtype != bool and not isinstance(x, Tracer)
    if is_known and jnp.any(x < 0):
        raise ValueError(f"{name} has negative numbers: what is added is bias=")
    x = jnp.asarray(x, dtype)
    try:
        # Compare, because (3, 1) and (1, 4) broadcast to a shape larger than either.
        fits = np.broadcast_shapes(x.shape, shape) == tuple(shape)
    except ValueError:
        fits = False
    if not fits:
        described = target.format(shape)
        raise ValueError(f"{name} {x.shape} does not broadcast to {described}")
    return x


def segments(query_ids: Any, key_ids: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns segment ids of queries and of keys, `(batch..., length)` each."""
    if query_ids is None and key_ids is None:
        return None, None
    if query_ids is None:
        raise ValueError("key_segment_ids also need query_segment_ids")
    whose = "key_segment_ids" if key_ids is not None else "query_segment_ids as keys'"
    key_ids = query_ids if key_ids is None else key_ids
    *batch, _, length, key_length = shape
    target = f"{{}}, (batch..., length), of the logits {shape}"

    def checked(name: str, ids: Any, length: int) -> jax.Array:
        rows = (*batch, length)
        return jnp.broadcast_to(broadcasting(name, ids, rows, target=target), rows)

    queries = checked("query_segment_ids", query_ids, length)
    return queries, checked(whose, key_ids, key_length)


def scalar(scale: Any, head_dim: int, dtype: Any) -> jax.Array:
    """Returns the scale of the logits, `1/sqrt(head_dim)` by default."""
    if scale is None:
        scale = 1 / math.sqrt(max(head_dim, 1))
    check_number("scale", scale, FINITE)
    return jnp.asarray(scale, dtype)


def make_window(is_causal: bool, local: Any) -> Window:
    """Returns a window from one number for both sides, or from a pair of integers."""
    pair = tuple(local) if np.iterable(local) else (local, local)
    if len(pair) != 2:
        raise ValueError(f"local_window_size must be one number or a pair, got {local}")
    before, after = pair
    after = 0 if check_flag("is_causal", is_causal) else after
    before, after = (
        min(max(check_whole_number("local_window_size", keys), -_ALL), _ALL)
        if keys is not None
        else None
        for keys in (before, after)
    )
    if None not in (before, after) and before + after < 0:
        raise ValueError(f"local_window_size {local} hides every key from every query")
    return before, after


def vary_as(tree: Any, like: Any) -> Any:
    """Returns the arrays typed as varying along each axis on which `like` varies.

    Under `jax.shard_map` a loop carries arrays of one type, so zeros need the type of
    the arrays that are added to them. The transpose sums a gradient over the devices on
    which its array was the same.
    """
    axes = {axis for x in jax.tree.leaves(like) for axis in manual_axes(x)}
    return jax.tree.map(lambda x: varying(x, tuple(sorted(axes))), tree)


def result_specs(
    query: jax.Array,
) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Returns specs of output, log-sum-exp and statistic, from the query's spec."""
    *batch, length, heads, _ = explicit_spec(query)
    return (
        PartitionSpec(*batch, length, heads, None),
        PartitionSpec(*batch, heads, length),
        PartitionSpec(heads),
    )


def product(query: jax.Array, key: jax.Array, dtype: Any) -> jax.Array:
    """Returns all inner products, `(batch..., heads, length, key_length)`."""
    if query.dtype != key.dtype:
        query, key = query.astype(dtype), key.astype(dtype)
    # Written as in jax.nn.dot_product_attention, so that XLA's common subexpression
    # elimination computes the product once for Flax's attention and the statistic. It
    # does not recognize a plain einsum over (key_heads, group).
    einsum = functools.partial(
        jnp.einsum, "...tnh,...snh->...nts", preferred_element_type=dtype
    )
    by_key = grouped(query, key.shape[-2], axis=-2)
    logits = jax.vmap(lambda q: einsum(q, key), in_axes=-2, out_axes=-3)(by_key)
    return logits.reshape(*query.shape[:-3], query.shape[-2], *logits.shape[-2:])


def grouped(x: jax.Array, key_heads: int, *, axis: int) -> jax.Array:
    """Reshapes query heads to `(key_heads, query heads per key head)`.

    Repeating the keys instead would cost as much memory as full multi-head attention.
    """
    groups = (key_heads, x.shape[axis] // max(key_heads, 1))
    return x.reshape(*x.shape[:axis], *groups, *x.shape[axis + 1 :])


def _block_of(x: Any, start: jax.Array, length: int, size: int, axis: int) -> Any:
    """Returns one block along an axis; an axis that only broadcasts stays."""
    if x is None or x.ndim < -axis or x.shape[axis] != length or length <= size:
        return x
    # JAX moves a slice that would end beyond the array. All blocks have one shape,
    # without padding, but the caller must know which rows come twice.
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis % x.ndim)

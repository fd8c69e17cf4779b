"""What the caller hands over, checked against the logits and made of one kind."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import array, FINITE, FLOATS, number
from .logits import LogitInputs
from .mesh_axes import vary_as


def logit_inputs(
    query: jax.Array,
    key: jax.Array,
    values: Sequence[jax.Array],
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_segment_ids: jax.Array | None,
    key_segment_ids: jax.Array | None,
    scale: float | jax.Array | None,
) -> tuple[LogitInputs, list[jax.Array]]:
    """And the values, all of one batch; raises `ValueError` where they do not fit."""
    shape, (query, key, *values) = fitting(query, key, *values)
    inputs = LogitInputs(
        query,
        key,
        broadcasting("bias", bias, shape),
        broadcasting("mask", mask, shape, bool),
        *segments(query_segment_ids, key_segment_ids, shape),
        jnp.arange(shape[-2]),
        jnp.arange(shape[-1]),
        scalar(scale, query.shape[-1], dtype_of_logits(query, key, *values)),
    )
    return vary_as((inputs, values), (inputs, values))


def fitting(
    query: jax.Array, key: jax.Array, *values: jax.Array
) -> tuple[tuple[int, ...], list[jax.Array]]:
    """The logits' `(batch..., heads, length, key_length)`, and all with that batch."""
    given = zip(("query", "key", "value"), (query, key, *values), strict=False)
    named = [(name, array(name, x)) for name, x in given]
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
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
    except ValueError:
        raise ValueError(f"{shapes}: their batch axes do not fit") from None
    spread = [jnp.broadcast_to(x, (*batch, *x.shape[-3:])) for x in arrays]
    return (*batch, heads, length, key_length), spread


def broadcasting(name: str, x: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """As an array, as small as it came."""
    if x is None:
        return None
    x = jnp.asarray(array(name, x, real=True), dtype)
    if not _broadcasts(x.shape, shape):
        raise ValueError(
            f"{name} {x.shape} does not broadcast to the logits {shape}, "
            "(batch..., heads, length, key_length)"
        )
    return x


def segments(query_ids: Any, key_ids: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Those of queries and keys, each as long as they are."""
    if query_ids is None and key_ids is None:
        return None, None
    if query_ids is None:
        raise ValueError("key_segment_ids need query_segment_ids beside them")
    *batch, _, length, key_length = shape
    whose = "key_segment_ids" if key_ids is not None else "query_segment_ids as keys'"
    key_ids = query_ids if key_ids is None else key_ids
    return (
        _of_length("query_segment_ids", query_ids, (*batch, length), shape),
        _of_length(whose, key_ids, (*batch, key_length), shape),
    )


def _of_length(name: str, x: Any, rows: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    x = array(name, x, real=True)
    if not _broadcasts(x.shape, rows):
        raise ValueError(
            f"{name} {x.shape} do not broadcast to {rows}, as the logits {shape} "
            "(batch..., heads, length, key_length) need them"
        )
    return jnp.broadcast_to(x, rows)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == tuple(to)
    except ValueError:
        return False


def scalar(scale: Any, head_dim: int, dtype: Any) -> jax.Array:
    """One over the root of `head_dim` by default."""
    if scale is None:
        scale = 1 / math.sqrt(max(head_dim, 1))
    number("scale", scale, FINITE)
    return jnp.asarray(scale, dtype)


def dtype_of_logits(*arrays: jax.Array) -> Any:
    """Float32, and float64 where an array has it."""
    wide = any(x.dtype == jnp.float64 for x in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)

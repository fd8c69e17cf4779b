"""Reads the per-head statistics that Flax returns."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import check_array
from .._parameters import paths


#: The name of the leaf that holds a layer's largest logits.
STATISTIC = "max_logits"


def keep_nan(maximum: jax.Array, is_nan: jax.Array) -> jax.Array:
    """Returns a maximum, or NaN where one of its numbers is.

    On CPU, XLA's maximum of many numbers loses a NaN, and one over devices loses all. A
    sum keeps them, and so does `jnp.maximum` of two arrays.
    """
    return jnp.where(is_nan, jnp.nan, maximum)


def largest(x: jax.Array, axes: int | Sequence[int]) -> jax.Array:
    """Returns the maximum along axes: NaN if one entry is, `-inf` without entries."""
    # The sum is also NaN if both infinities occur. Scaled by 2**-64 it cannot overflow.
    # XLA forms both in one pass, or the second pass costs a fraction of the product
    # before it. In float16 the factor would be zero and turn -inf into NaN.
    maximum = jnp.max(x, axes, initial=-jnp.inf)
    scaled = x.astype(np.promote_types(x.dtype, np.float32)) * 2.0**-64
    is_nan = jnp.isnan(jnp.sum(scaled, axes)) & (maximum < jnp.inf)
    return keep_nan(maximum, is_nan)


def largest_of_devices(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the maximum over mesh axes: NaN if one device has a NaN."""
    maximum, is_nan = jax.lax.pmax((x, jnp.isnan(x).astype(x.dtype)), axes)
    return keep_nan(maximum, is_nan > 0)


def read_attention_stats(attention_stats: Any) -> dict[paths.Path, jax.Array]:
    """Returns the `max_logits` leaves by path: the maximum, if a sow has several."""
    tree = paths.flatten(attention_stats)
    stats: dict[paths.Path, jax.Array] = {}
    for path, leaf in tree.rows():
        # Linen's `sow` stores a tuple with one entry per call of the module.
        stat_path = path
        while stat_path and stat_path[-1].isdigit():
            stat_path = stat_path[:-1]
        if stat_path[-1:] != (STATISTIC,) or paths.is_masked(leaf):
            continue
        leaf = check_array(f"the statistics '{paths.show(path)}'", leaf, real=True)
        leaf = jax.lax.stop_gradient(leaf.astype(jnp.float32))
        module = stat_path[:-1]
        stats[module] = jnp.maximum(stats[module], leaf) if module in stats else leaf
    return stats

"""Per-head statistics, read from whatever Flax returns."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import array
from .._parameters import paths


#: The name of the leaf that holds a layer's largest logits.
STATISTIC = "max_logits"


def largest(x: jax.Array, axes: int | Sequence[int]) -> jax.Array:
    """The maximum along axes, NaN wherever one entry is; `-inf` of no entries."""
    # XLA's maximum of many numbers loses a NaN on CPU, its sum does not. That is NaN
    # for both infinities together, too, and cannot overflow, scaled down so far. The
    # compiler forms both in one pass, or one that takes a fraction of the product in
    # front of it. In float16 the factor would be zero, and make -inf NaN.
    found = jnp.max(x, axes, initial=-jnp.inf)
    scaled = x.astype(np.promote_types(x.dtype, np.float32)) * 2.0**-64
    is_nan = jnp.isnan(jnp.sum(scaled, axes)) & (found < jnp.inf)
    return jnp.where(is_nan, jnp.nan, found)


def largest_of_devices(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The maximum over axes of a mesh, NaN wherever one device has one."""
    # A maximum over devices loses every NaN on CPU.
    found, is_nan = jax.lax.pmax((x, jnp.isnan(x).astype(x.dtype)), axes)
    return jnp.where(is_nan > 0, jnp.nan, found)


def read_attention_stats(attention_stats: Any) -> dict[paths.Path, jax.Array]:
    """Finds the `max_logits` leaves; several entries of a plain sow are maximized."""
    tree = paths.flatten(attention_stats)
    stats: dict[paths.Path, jax.Array] = {}
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        # Linen's `sow` stores a tuple, with an entry for each call of the module.
        at = path
        while at and at[-1].isdigit():
            at = at[:-1]
        if at[-1:] != (STATISTIC,) or paths.is_masked(leaf):
            continue
        leaf = array(f"the statistics '{paths.show(path)}'", leaf, real=True)
        leaf = jax.lax.stop_gradient(leaf.astype(jnp.float32))
        module = at[:-1]
        stats[module] = jnp.maximum(stats[module], leaf) if module in stats else leaf
    return stats

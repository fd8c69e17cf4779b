"""Ordering tokens: zeros that depend on other arrays, so that work waits for them.

XLA orders operations by their data alone. A barrier would not do, since compilers drop
it before they put operations in order.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """0, but known only when all arrays are there."""
    numbers = [jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)


def wait_for(zero: jax.Array, x: jax.Array) -> jax.Array:
    """An array, but whole only when the zero is known.

    One entry waits for it, in place: a sum with all of them would be a copy.
    """
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)

"""Zeros that are not known before something else is, so that others wait for it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """0, but known only when all arrays are there."""
    numbers = [jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)


def wait_for(zero: jax.Array, x: jax.Array) -> jax.Array:
    """An array, but whole only when the zero is known: one entry waits for it."""
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)

"""Scaled weights, rounded once: as weights, or as the updates that lead there."""

import jax
import jax.numpy as jnp
import numpy as np


def scale_weight(param: jax.Array, scale: jax.Array) -> jax.Array:
    """Leaves the entries whose scale is 1 alone, bit for bit."""
    wide = np.promote_types(param.dtype, jnp.float32)
    scaled = (param.astype(wide) * scale.astype(wide)).astype(param.dtype)
    return jnp.where(scale == 1, param, scaled)


def scale_update(update: jax.Array, param: jax.Array, scale: jax.Array) -> jax.Array:
    """The update after which `param` is `scale * (param + update)`, rounded once.

    The target is rounded to the dtype of `param` before `param` is taken off, which is
    exact for scales down to 1/2; adding a rounded difference instead would round twice.
    """
    wide = np.promote_types(np.promote_types(param.dtype, update.dtype), jnp.float32)
    p, u, s = param.astype(wide), update.astype(wide), scale.astype(wide)
    target = (p + (u + (s - 1) * (p + u))).astype(param.dtype)
    return jnp.where(scale == 1, update, (target.astype(wide) - p).astype(update.dtype))

"""Scaled weights, rounded once: as weights, or as the updates that lead there."""

import jax
import jax.numpy as jnp
import numpy as np


def scale_weight(param: jax.Array, scale: jax.Array) -> jax.Array:
    """Leaves the entries whose scale is 1 alone, bit for bit."""
    wide, scale = np.promote_types(param.dtype, jnp.float32), _laid_as(param, scale)
    scaled = (param.astype(wide) * scale.astype(wide)).astype(param.dtype)
    return jnp.where(scale == 1, param, scaled)


def scale_update(update: jax.Array, param: jax.Array, scale: jax.Array) -> jax.Array:
    """The update after which `param` is `scale * (param + update)`, rounded once.

    It is float32 at least: in a shorter dtype, the difference between a weight and one
    that is much smaller would be rounded to more than the smaller one.
    """
    wide = np.promote_types(np.promote_types(param.dtype, jnp.float32), update.dtype)
    old, step = param.astype(wide), update.astype(wide)
    scale = _laid_as(param, scale)
    target = ((old + step) * scale.astype(wide)).astype(param.dtype)
    return jnp.where(scale == 1, step, target.astype(wide) - old)


def _laid_as(param: jax.Array, scale: jax.Array) -> jax.Array:
    """On explicit axes of a mesh, arrays of one shape join only if they lie alike."""
    spec = jax.typeof(param).sharding.spec
    is_cut = scale.shape == param.shape and any(spec)
    return jax.sharding.reshard(scale, spec) if is_cut else scale

"""Scaled weights, rounded once: as weights, or as the updates that lead there."""

import jax
import jax.numpy as jnp


def scale_weight(param: jax.Array, scale: jax.Array) -> jax.Array:
    """Leaves the entries whose scale is 1 alone, bit for bit."""
    wide = jnp.promote_types(param.dtype, jnp.float32)
    scaled = (param.astype(wide) * scale.astype(wide)).astype(param.dtype)
    return jnp.where(scale == 1, param, scaled)


def scale_update(update: jax.Array, param: jax.Array, scale: jax.Array) -> jax.Array:
    """The update after which `param` is what `scale_weight` makes of the new weight.

    It is float32 or wider: in the dtype of short params, or of short updates, there is
    no number that leads to a weight much smaller than the old one.
    """
    wide = jnp.promote_types(jnp.promote_types(param.dtype, update.dtype), jnp.float32)
    old, step = param.astype(wide), update.astype(wide)
    # As `optax.apply_updates` adds and rounds.
    target = scale_weight((old + step).astype(param.dtype), scale)
    return jnp.where(scale == 1, step, target.astype(wide) - old)

"""What a step sees in the heads, and by how much it would scale them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class HeadReading(NamedTuple):
    """What a step sees in all heads, `(all heads,)`."""

    max_logits: jax.Array  # float32
    clipped: jax.Array  # bool
    gamma: jax.Array  # float32

    def without(self, left_alone: jax.Array) -> "HeadReading":
        """The same, but for heads that are not to be clipped."""
        gamma = jnp.where(left_alone, 1, self.gamma)
        return self._replace(clipped=self.clipped & ~left_alone, gamma=gamma)


def read_heads(logits: jax.Array, threshold: Any) -> HeadReading:
    """`gamma` is `tau/S` where a finite `S` exceeds `tau`, exactly 1 elsewhere.

    A schedule may fall to 0 or below, which no scaling reaches: nothing is clipped.
    """
    threshold = jnp.asarray(threshold, jnp.float32)
    over = jnp.isfinite(logits) & (logits > threshold) & (threshold > 0)
    gamma = jnp.where(over, threshold / jnp.where(over, logits, 1), 1)
    return HeadReading(logits, over, gamma.astype(jnp.float32))

"""The state of QK-Clip, and what a step sees in the heads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class QKClipState(NamedTuple):
    """What [`qk_clip`][] saw and did in the last step, to log by `optax.tree.get`.

    The heads of all layers are in one row, which keeps the structure of the state the
    same for every model; [`qk_clip_metrics`][] gives them back by layer. On a mesh and
    inside `jax.shard_map` every device has the whole row.

    - `step`: int32, `()`; updates so far, for schedules.
    - `max_logit`: float32, `()`; the largest finite $S$, `-inf` if there is none.
    - `num_clipped`: int32, `()`; heads that were scaled.
    - `num_nonfinite`: int32, `()`; heads whose $S$ is infinite or NaN.
    - `max_logits`: float32, `(all heads,)`; $S$.
    - `gamma`: float32, `(all heads,)`; 1 where the head was left alone.
    - `last_clip`: int32, `(all heads,)`; step of the last clip, -1 if there was none.

    !!! example

        >>> import jax.numpy as jnp, optax
        >>> import muonclip_jax as mc
        >>> state = mc.qk_clip().init({"w": jnp.ones((2, 3))})
        >>> int(optax.tree.get(state, "num_clipped"))
        0
    """

    step: jax.Array
    max_logit: jax.Array
    num_clipped: jax.Array
    num_nonfinite: jax.Array
    max_logits: jax.Array
    gamma: jax.Array
    last_clip: jax.Array


def first_state(heads: int) -> QKClipState:
    return QKClipState(
        step=jnp.zeros((), jnp.int32),
        max_logit=jnp.full((), -jnp.inf, jnp.float32),
        num_clipped=jnp.zeros((), jnp.int32),
        num_nonfinite=jnp.zeros((), jnp.int32),
        max_logits=jnp.full(heads, -jnp.inf, jnp.float32),
        gamma=jnp.ones(heads, jnp.float32),
        last_clip=jnp.full(heads, -1, jnp.int32),
    )


def next_state(state: QKClipState, logits: jax.Array, gamma: jax.Array) -> QKClipState:
    """The state after a step that saw these logits and scales by these gammas."""
    finite, clipped = jnp.isfinite(logits), gamma < 1
    return QKClipState(
        step=jnp.asarray(optax.safe_increment(state.step)),
        max_logit=jnp.max(logits, initial=-jnp.inf, where=finite),
        num_clipped=jnp.sum(clipped, dtype=jnp.int32),
        num_nonfinite=jnp.sum(~finite, dtype=jnp.int32),
        max_logits=logits,
        gamma=gamma,
        last_clip=jnp.where(clipped, state.step, state.last_clip),
    )


def gammas(logits: jax.Array, threshold: Any) -> jax.Array:
    """`tau/S` where a finite `S` exceeds `tau`, exactly 1 elsewhere; float32.

    A schedule may fall to 0 or below, which no scaling reaches: nothing is clipped.
    """
    threshold = jnp.asarray(threshold, jnp.float32)
    over = jnp.isfinite(logits) & (logits > threshold) & (threshold > 0)
    return jnp.where(over, threshold / jnp.where(over, logits, 1), 1)

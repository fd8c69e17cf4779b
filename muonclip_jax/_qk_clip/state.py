"""What QK-Clip reads in the heads of a step, and remembers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class HeadReading(NamedTuple):
    """What a step sees in all heads, `(all heads,)`."""

    max_logits: jax.Array  # float32
    clipped: jax.Array  # bool
    gamma: jax.Array  # float32


def read_heads(logits: jax.Array, threshold: Any) -> HeadReading:
    """`gamma` is `tau/S` where a finite `S` exceeds `tau`, exactly 1 elsewhere."""
    threshold = jnp.asarray(threshold, jnp.float32)
    over = jnp.isfinite(logits) & (logits > threshold)
    gamma = jnp.where(over, threshold / jnp.where(over, logits, 1), 1)
    return HeadReading(logits, over, gamma.astype(jnp.float32))


class QKClipState(NamedTuple):
    """What the last step saw and did, for logging with `optax.tree.get`.

    The heads of all layers are in one row, which keeps the structure of the state the
    same for every model; [`qk_clip_metrics`][] gives them back by layer.
    """

    step: jax.Array  # shape=(), int32; updates so far, for schedules
    max_logit: jax.Array  # shape=(), float32; largest finite S, -inf if none
    num_clipped: jax.Array  # shape=(), int32; heads over the threshold
    num_nonfinite: jax.Array  # shape=(), int32; heads whose S is inf or NaN
    max_logits: jax.Array  # shape=(all heads,), float32; S
    gamma: jax.Array  # shape=(all heads,), float32; 1 where the head was left alone
    last_clip: jax.Array  # shape=(all heads,), int32; its step, -1 if there was none


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


def next_state(state: QKClipState, heads: HeadReading) -> QKClipState:
    finite = jnp.isfinite(heads.max_logits)
    return QKClipState(
        step=jnp.asarray(optax.safe_increment(state.step)),
        max_logit=jnp.max(heads.max_logits, initial=-jnp.inf, where=finite),
        num_clipped=jnp.sum(heads.clipped, dtype=jnp.int32),
        num_nonfinite=jnp.sum(~finite, dtype=jnp.int32),
        max_logits=heads.max_logits,
        gamma=heads.gamma,
        last_clip=jnp.where(heads.clipped, state.step, state.last_clip),
    )

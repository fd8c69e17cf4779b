"""What QK-Clip remembers from step to step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .effect import ClipRecord, first_record, judge
from .reading import HeadReading


class QKClipState(NamedTuple):
    """What [`qk_clip`][] saw and did in the last step, to log by `optax.tree.get`.

    The heads of all layers are in one row, which keeps the structure of the state the
    same for every model; [`qk_clip_metrics`][] gives them back by layer.

    - `step`: int32, `()`; updates so far, for schedules.
    - `max_logit`: float32, `()`; the largest finite $S$, `-inf` if there is none.
    - `num_clipped`: int32, `()`; heads that were scaled.
    - `num_nonfinite`: int32, `()`; heads whose $S$ is infinite or NaN.
    - `max_logits`: float32, `(all heads,)`; $S$.
    - `gamma`: float32, `(all heads,)`; 1 where the head was left alone.
    - `last_clip`: int32, `(all heads,)`; step of the last clip, -1 if there was none.
    - `record`: what clips did so far, to find heads on which they have no effect.

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
    record: ClipRecord


def first_state(heads: int) -> QKClipState:
    return QKClipState(
        step=jnp.zeros((), jnp.int32),
        max_logit=jnp.full((), -jnp.inf, jnp.float32),
        num_clipped=jnp.zeros((), jnp.int32),
        num_nonfinite=jnp.zeros((), jnp.int32),
        max_logits=jnp.full(heads, -jnp.inf, jnp.float32),
        gamma=jnp.ones(heads, jnp.float32),
        last_clip=jnp.full(heads, -1, jnp.int32),
        record=first_record(heads),
    )


def next_state(
    state: QKClipState, heads: HeadReading, log_sizes: jax.Array
) -> tuple[QKClipState, HeadReading]:
    """The state after a step, and which heads that step is to clip."""
    since = state.step - state.last_clip
    record, heads = judge(state.record, heads, log_sizes, since)
    finite = jnp.isfinite(heads.max_logits)
    after = QKClipState(
        step=jnp.asarray(optax.safe_increment(state.step)),
        max_logit=jnp.max(heads.max_logits, initial=-jnp.inf, where=finite),
        num_clipped=jnp.sum(heads.clipped, dtype=jnp.int32),
        num_nonfinite=jnp.sum(~finite, dtype=jnp.int32),
        max_logits=heads.max_logits,
        gamma=heads.gamma,
        last_clip=jnp.where(heads.clipped, state.step, state.last_clip),
        record=record,
    )
    return after, heads

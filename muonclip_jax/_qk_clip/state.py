"""What QK-Clip remembers of the heads, and reports."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._model import paths
from .._model.attention_layers import Attention, resolve_attention
from .bound_layers import bind, BoundLayer, count_heads, from_row, to_row
from .head_scales import HeadReading


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


def first_state(layers: list[BoundLayer]) -> QKClipState:
    heads = count_heads(layers)
    return QKClipState(
        step=jnp.zeros((), jnp.int32),
        max_logit=jnp.full((), -jnp.inf, jnp.float32),
        num_clipped=jnp.zeros((), jnp.int32),
        num_nonfinite=jnp.zeros((), jnp.int32),
        max_logits=jnp.full(heads, -jnp.inf, jnp.float32),
        gamma=jnp.ones(heads, jnp.float32),
        last_clip=jnp.full(heads, -1, jnp.int32),
    )


def next_state(state: QKClipState, readings: list[HeadReading]) -> QKClipState:
    floats = jnp.zeros(0, jnp.float32)
    nothing = HeadReading(floats, jnp.zeros(0, bool), floats)
    heads = jax.tree.map(lambda *parts: to_row(parts), nothing, *readings)
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


def qk_clip_metrics(
    opt_state: Any, params: optax.Params, *, attention: Attention | None = None
) -> dict[str, Any]:
    """What QK-Clip saw and did, as a pytree to log; works under `jit`.

    **Arguments:**

    - `opt_state`: of an optimizer with [`qk_clip`][] in it, however deeply wrapped.
    - `params`, `attention`: as the optimizer has them; `params` may be abstract.

    **Returns:** a dict with

    - `"max_logit"`, `"num_clipped"`, `"num_nonfinite"`: of the last step, as in
        [`QKClipState`][];
    - `"clipped_fraction"`, `"ever_clipped_fraction"`: the share of all heads that was
        clipped in the last step, and in any step so far (12.7 % in Kimi K2);
    - `"layers"`: by the path of each attention layer, a dict of arrays
        `(*stack, heads)`: `"max_logits"`, `"gamma"` (1 where the head was left alone)
        and `"steps_since_clip"` (-1 if it never was clipped).

    Heads that share a leaf, such as the gain of a norm, count as one.

    **Raises:** `ValueError` if there is no `qk_clip` in the optimizer, or several, or
    if it was made for other params.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> tx = mc.muonclip(1e-3)
        >>> stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> _, state = tx.update(
        ...     params, tx.init(params), params, attention_stats=stats
        ... )
        >>> metrics = mc.qk_clip_metrics(state, params)
        >>> metrics["layers"]["attn"]["gamma"]
        Array([1.  , 0.25], dtype=float32)
        >>> float(metrics["ever_clipped_fraction"])
        0.5
    """
    state = _find(opt_state)
    layers = bind(paths.flatten(params), resolve_attention(attention, params))
    if count_heads(layers) != state.gamma.size:
        raise ValueError(
            f"the optimizer state holds {state.gamma.size} heads, the params "
            f"{count_heads(layers)}; hand over the params and attention= of its init"
        )
    since = jnp.where(state.last_clip < 0, -1, state.step - 1 - state.last_clip)
    rows = {
        "max_logits": state.max_logits,
        "gamma": state.gamma,
        "steps_since_clip": since,
    }
    by_layer = {name: from_row(row, layers) for name, row in rows.items()}
    count = max(1, state.gamma.size)
    return {
        "max_logit": state.max_logit,
        "num_clipped": state.num_clipped,
        "num_nonfinite": state.num_nonfinite,
        "clipped_fraction": state.num_clipped / count,
        "ever_clipped_fraction": jnp.sum(state.last_clip >= 0) / count,
        "layers": {
            layer.path: {name: row[i] for name, row in by_layer.items()}
            for i, layer in enumerate(layers)
        },
    }


def _find(opt_state: Any) -> QKClipState:
    def is_state(x: Any) -> bool:
        return isinstance(x, QKClipState)

    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(f"the optimizer has {len(found)} qk_clip states, expected one")
    # An `nnx.Optimizer` holds variables in place of arrays.
    return QKClipState(*(jnp.asarray(field) for field in found[0]))

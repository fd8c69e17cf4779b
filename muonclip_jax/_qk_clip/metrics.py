"""Metrics of QK-Clip by layer, to log."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._layout.layout import read_layout
from .._model.attention_layers import Attention, attention_of
from .._parameters.given import Model
from .heads import Heads
from .multi_steps import MultiStepsState
from .qk_clip import QKClipState


def qk_clip_metrics(
    opt_state: Any,
    params: optax.Params,
    *,
    model: Model | None = None,
    attention: Attention | None = None,
) -> dict[str, Any]:
    """The last step of QK-Clip, as a pytree to log; works under `jit`.

    **Arguments:**

    - `opt_state`: of an optimizer with [`qk_clip`][] in it, however deeply wrapped.
    - `params`, `model`, `attention`: as the optimizer has them. Params may be
        abstract.

    **Returns:** a dict with

    - `"max_logit"`, `"num_clipped"`, `"num_nonfinite"`: of the last step, as in
        [`QKClipState`][];
    - `"clipped_fraction"`, `"ever_clipped_fraction"`: the share of all heads that was
        clipped in the last step, and in any step so far (12.7 % in Kimi K2,
        arXiv:2507.20534, appendix D);
    - `"layers"`: by the path of each attention layer, a dict of arrays
        `(*stack, heads)`: `"max_logits"`, `"gamma"` (1 where the head was left alone)
        and `"steps_since_clip"` (-1 if it never was clipped).

    Heads that share a leaf, such as the gain of a norm, count as one.

    **Warns:** where `qk_clip` is inside a plain `optax.MultiSteps`, see
    [`multi_steps`][].

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
    state, heads = (
        _find(opt_state),
        Heads(read_layout(params), attention_of(model, attention)),
    )
    if heads.count != state.gamma.size:
        raise ValueError(
            f"the optimizer state holds {state.gamma.size} heads, the params "
            f"{heads.count}; pass the params and attention= of its init"
        )
    # `step` counts updates, so that the last one had the number before it.
    since = jnp.where(state.last_clip < 0, -1, state.step - 1 - state.last_clip)
    rows = dict(max_logits=state.max_logits, gamma=state.gamma, steps_since_clip=since)
    by_layer = {name: heads.by_layer(row) for name, row in rows.items()}
    count = max(1, state.gamma.size)
    return {
        "max_logit": state.max_logit,
        "num_clipped": state.num_clipped,
        "num_nonfinite": state.num_nonfinite,
        "clipped_fraction": state.num_clipped / count,
        "ever_clipped_fraction": jnp.sum(state.last_clip >= 0) / count,
        "layers": {
            "/".join(layer.path): {name: row[i] for name, row in by_layer.items()}
            for i, layer in enumerate(heads.layers)
        },
    }


def _find(opt_state: Any) -> QKClipState:
    found = states_of(opt_state, QKClipState)
    if len(found) != 1:
        raise ValueError(f"the optimizer has {len(found)} qk_clip states, expected one")
    # `is_leaf` stops at the first of either kind: an optax state inside of ours, which
    # has combined the statistics, is not found.
    steps = states_of(opt_state, (MultiStepsState, optax.MultiStepsState))
    plain = [x for x in steps if isinstance(x, optax.MultiStepsState)]
    if states_of(plain, QKClipState):
        warnings.warn(
            "qk_clip inside optax.MultiSteps sees the statistics of the last "
            "micro-batch alone and clips too little, unless you combine them yourself "
            "(mc.combine_attention_stats). mc.multi_steps does it for you",
            stacklevel=3,
        )
    # An `nnx.Optimizer` holds variables in place of arrays, which are no tuples.
    return jax.tree.map(
        jnp.asarray, found[0], is_leaf=lambda x: not isinstance(x, tuple)
    )


def states_of(tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """The parts of an optimizer's state that are of a kind, the outermost of each."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]

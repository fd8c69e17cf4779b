"""QK-Clip: attention heads whose logits grew too large get smaller projections.

statistics, attention layers -> gamma per head -> scale per leaf -> params or updates.

What is made explicit where the paper (arXiv:2507.20534, section 2.1) is silent:
biases scale with their kernel; a key shared by several query heads is left alone, as
the paper leaves the shared rotary key, and the query takes the whole gamma; a head
without a finite statistic is left alone.
"""

import functools
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from .._layout.layout import check_replicas, over_replicas, read_layout
from .._layout.placement import Shardings
from .._layout.zeros import replicated
from .._model.attention_layers import Attention
from .._model.statistics import read_attention_stats
from .._options import number, POSITIVE, SHARE
from .._parameters.paths import show_all, show_module
from .heads import Heads
from .state import first_state, gammas, next_state, QKClipState
from .weights import scale_update, scale_weight


def qk_clip(
    threshold: optax.ScalarOrSchedule = 100.0,
    *,
    alpha: optax.ScalarOrSchedule = 0.5,
    attention: Attention | None = None,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""QK-Clip as the last transformation of a chain, behind any optimizer.

    For every head whose largest logit $S$ of this step's batch exceeds $\tau$,

    $$\gamma = \tau / S, \qquad W_q \leftarrow \gamma^{\alpha} W_q, \qquad
      W_k \leftarrow \gamma^{1-\alpha} W_k$$

    applied to the weights after the update, biases included. Updates of all other
    heads and leaves keep their values bit for bit. The scaled weight is formed in
    float32 and rounded once, as by [`clip_qk`][], whatever the dtypes: updates of the
    leaves that `qk_clip` scales are float32 at least, which `optax.apply_updates`
    adds before it rounds. All other updates keep their dtype.

    Where query and key are normalized after their projection, scaling it does nothing:
    `init` refuses such a layer, and names what to scale in its place.

    Wrappers that choose between the updates they were given and the optimizer's, such
    as `optax.apply_if_finite`, want both in one dtype: for bfloat16 and float16
    gradients they go around what is in front,
    `optax.chain(optax.apply_if_finite(mc.muon(...), 3), mc.qk_clip())`.

    **Arguments:**

    - `threshold`: $\tau$, in logits, or a schedule of it; `float("inf")` watches the
        logits and clips nothing.
    - `alpha`: the query's share of the scaling, in [0, 1], or a schedule of it.
    - `attention`: a sequence of [`AttentionLayer`][] or a function of the params that
        returns one. Left out, it is [`flax_attention_layers`][], which finds the
        attention of stock Flax.
    - `shardings`: as for [`muon`][]; needed inside a `jax.shard_map` whose axes cut
        query and key. The layer's statistics may then be of all heads or of those of
        the device, and the state is of all heads on every device.
    - `axis_name`: the axis of `jax.pmap` or `jax.shard_map`, or a tuple of axes, over
        which the batch is divided; statistics are maximized over it in one collective.
        Under `jit` nothing is needed.

    **Returns:** an `optax.GradientTransformationExtraArgs` whose `update` needs
    `params` and `attention_stats`: a pytree that mirrors the modules, with a leaf
    `<module path>/max_logits` of shape `(heads,)` or `(*stack, heads)` for every
    attention layer, as [`attention_fn`][] sows it. Pass `{}` for a model without
    attention. State: [`QKClipState`][]. Under gradient accumulation use
    [`multi_steps`][]: `optax.MultiSteps` hands over the statistics of the last
    micro-batch alone, and heads that grew in the others are clipped too little.

    **Raises:** `ValueError` for a threshold that is not positive or an alpha outside
    [0, 1], or an alpha of more numbers than one; at `init` for thresholds that do not
    fit the layers, for QK-normalised attention, and without `attention` for query and
    key under other names than Flax's (`q_proj`, `wq`, ...); at the first update, naming
    the paths, for missing params or statistics and for statistics that do not fit.

    !!! example

        >>> import jax.numpy as jnp, optax
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))  # two heads
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> tx = optax.chain(optax.sgd(0.0), mc.qk_clip(threshold=100.0))
        >>> updates, state = tx.update(
        ...     params, tx.init(params), params,
        ...     attention_stats={"attn": {"max_logits": jnp.array([90.0, 400.0])}},
        ... )
        >>> optax.apply_updates(params, updates)["attn"]["query"]["kernel"][0, :, 0]
        Array([1. , 0.5], dtype=float32)
        >>> int(optax.tree.get(state, "num_clipped"))
        1

    ??? cite "References"

        Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1.
    """
    number("threshold", threshold, POSITIVE, "an array", "a schedule")
    number("alpha", alpha, SHARE, "a schedule")

    def init_fn(params: optax.Params) -> QKClipState:
        layout = read_layout(params, shardings, axis_name)
        heads = Heads(layout, attention)
        _check_first(_thresholds(heads, threshold, step=0))
        placement = layout.placement(layout.tree.leaves)
        return replicated(first_state(heads.count), placement)

    def update_fn(updates, state, params=None, *, attention_stats=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "qk_clip needs the params: tx.update(grads, state, params, ...)"
            )
        layout = read_layout(params, shardings, axis_name)
        check_replicas(layout.replicas, attention_stats)
        heads = Heads(layout, attention)
        heads.check_state(state.gamma)
        logits, step = heads.read(attention_stats), state.step
        placement = layout.placement(layout.tree.leaves)
        logits = replicated(logits, placement)
        gamma = gammas(logits, _thresholds(heads, threshold, step))
        scale_at = heads.scales(gamma, _at(alpha, step))
        tree = layout.tree
        clipped = [
            scale_update(u, p, scale_at[path]) if path in scale_at else u
            for path, p, u in zip(*tree[:2], tree.of(updates), strict=True)
        ]
        state = replicated(next_state(state, logits, gamma), placement)
        return tree.unflatten(clipped), state

    return over_replicas(init_fn, update_fn, axis_name)


def clip_qk(
    params: optax.Params,
    attention_stats: Any,
    threshold: float | jax.Array = 100.0,
    *,
    alpha: float | jax.Array = 0.5,
    attention: Attention | None = None,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
) -> optax.Params:
    """QK-Clip as a function on params, for loops that cannot pass extra arguments.

    Call it after the optimizer step with the statistics of the same step.

    **Arguments:**

    - `params`: after the step.
    - `attention_stats`: as for the update of [`qk_clip`][].
    - `threshold`, `alpha`: as for [`qk_clip`][], but numbers and no schedules.
    - `attention`, `shardings`, `axis_name`: as for [`qk_clip`][].

    **Returns:** params of the same structure, shapes and dtypes. Leaves of heads at or
    under the threshold keep their values bit for bit.

    **Raises:** `ValueError` as [`qk_clip`][] does, and for schedules.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> mc.clip_qk(params, stats)["attn"]["key"]["kernel"][0, :, 0]
        Array([1. , 0.5], dtype=float32)

    ??? cite "References"

        Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1.
    """
    number("threshold", threshold, POSITIVE, "an array", "a schedule")
    number("alpha", alpha, SHARE, "a schedule")
    if swapped := read_attention_stats(params):
        raise ValueError(
            f"the params hold the statistics of {show_all(swapped)}: "
            "mc.clip_qk(params, attention_stats), in this order"
        )
    layout = read_layout(params, shardings, axis_name)
    check_replicas(layout.replicas)
    heads = Heads(layout, attention)
    logits = heads.read(attention_stats)
    gamma = gammas(logits, _thresholds(heads, threshold))
    scale_at = heads.scales(gamma, _at(alpha))
    clipped = [
        scale_weight(p, scale_at[path]) if path in scale_at else p
        for path, p in zip(*layout.tree[:2], strict=True)
    ]
    return layout.tree.unflatten(clipped)


def _thresholds(heads: Heads, threshold: Any, step: Any = None) -> jax.Array:
    for layer in heads.layers:
        name = f"threshold of layer '{show_module(layer.path)}'"
        if layer.threshold is not None:
            number(name, layer.threshold, POSITIVE, "an array", "a schedule")
    return heads.thresholds(threshold, functools.partial(_at, step=step))


def _check_first(thresholds: jax.Array) -> None:
    """Raises for schedules that begin at 0, as those of a warm-up do."""
    if not isinstance(thresholds, Tracer) and not np.all(np.asarray(thresholds) > 0):
        raise ValueError(
            "threshold must be positive, but its schedule begins at "
            f"{np.min(thresholds):g}, which would scale query and key to zero"
        )


def _at(value: Any, step: Any = None) -> Any:
    if callable(value) and step is None:
        raise ValueError(
            "clip_qk does not count steps, so it takes no schedule: pass the value of "
            "this step"
        )
    return value(step) if callable(value) else value

"""QK-Clip: scales down the projections of attention heads whose logits are too large.

statistics, attention layers -> gamma per head -> scale per leaf -> params or updates.

Choices on which the paper (arXiv:2507.20534, section 2.1) is silent: biases scale with
their kernel; a key that several query heads or layers share stays, like the paper's
shared rotary key, and the query gets the whole gamma (`shares`); a head without a
finite statistic stays.
"""

from __future__ import annotations  # help() shows aliases by name

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._calls import explained
from .._layout.layout import check_replicas, over_replicas, read_layout
from .._layout.shardings import Shardings
from .._layout.state import first_state, replicated
from .._mesh_axes import explicit_spec, resharded
from .._model.attention_layers import Attention
from .._model.knowledge import knowledge_of
from .._model.model_reading import ModelReading
from .._model.statistics import read_attention_stats
from .._options import check_state
from .._parameters.fit import check_fit, check_params
from .._parameters.paths import show_all
from .heads import Heads, UNKNOWN
from .rule import ClipRule


Params = TypeVar("Params")


class QKClipState(NamedTuple):
    """The state of [`qk_clip`][]: all heads at the last step, for `optax.tree.get`.

    The heads of all layers are in one row, so every model has a state of the same
    structure; `scalars(..., heads=True)` returns them by layer. On a mesh and inside
    `jax.shard_map` every device has the whole row.

    - `step`: int32, `()`; updates so far, for schedules.
    - `max_logit`: float32, `()`; the largest finite $S$, or the smallest float32 if no
        $S$ is finite (`jax_debug_infs` refuses an infinite state).
    - `num_clipped`: int32, `()`; heads that were scaled.
    - `num_nonfinite`: int32, `()`; heads whose $S$ is infinite or NaN.
    - `max_logits`: float32, `(all heads,)`; $S$.
    - `gamma`: float32, `(all heads,)`; 1 if the head was not scaled.
    - `last_clip`: int32, `(all heads,)`; step of the last clip, or -1.

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


@explained
def qk_clip(
    threshold: optax.ScalarOrSchedule = 100.0,
    *,
    alpha: optax.ScalarOrSchedule = 0.5,
    model: ModelReading | None = None,
    attention: Attention | None = None,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""QK-Clip as the last transformation of a chain, after any optimizer.

    For every head whose largest logit $S$ of this step's batch exceeds $\tau$,

    $$\gamma = \tau / S, \qquad W_q \leftarrow \gamma^{\alpha} W_q, \qquad
      W_k \leftarrow \gamma^{1-\alpha} W_k$$

    applied to the weights after the update, biases of query and key included. A bias
    that is added to the logits stays, and $S$ does not include it. For leaves that
    heads, layers, or query and key share, see [`AttentionLayer`][]. Updates of all
    other heads and leaves keep their values bit for bit. In every dtype, the scaled
    weight is computed in float32 and rounded once, as in [`clip_qk`][]: updates of
    scaled leaves are at least float32, and `optax.apply_updates` adds them before it
    rounds. All other updates keep their dtype.

    A sum of weight and update is exact to $2^{-24}$ of the old weight, so a scaled
    weight has a relative error of $2^{-24}$ over its scale: up to 1e-4 for $S$ up to
    $10^6 \tau$, or $10^3 \tau$ if query or key alone is scaled. A weight is never
    scaled by less than $2^{-14}$ in one update; a head further above the threshold
    comes down in several. [`clip_qk`][] has neither limit.

    If query and key are normalized after their projection, scaling it has no effect.
    With `model` the gains of the norms are scaled; without it such a layer is an error.

    Wrappers that choose between the gradients and the optimizer's updates, such as
    `optax.apply_if_finite`, need both in one dtype. Cast bfloat16 and float16 gradients
    to float32 in front of them, by `optax.stateless_with_tree_map`.

    **Arguments:**

    - `threshold`: $\tau$, in logits, or a schedule of it; `float("inf")` watches the
        logits and clips nothing. With `model` it also watches logits that no parameter
        scales.
    - `alpha`: the query's share of the scaling, in [0, 1], or a schedule of it, whose
        values after the first step are clipped to that range.
    - `model`: the result of [`read_model`][]; its attention layers are clipped.
    - `attention`: a sequence of [`AttentionLayer`][] or a function of the params that
        returns one; it overrides `model`. Without either it is
        [`flax_attention_layers`][], which finds the attention of stock Flax.
    - `shardings`: as for [`muon`][]; needed inside a `jax.shard_map` whose axes cut
        query and key. A layer's statistics may then have all heads or only the heads of
        the device. The state has all heads on every device.
    - `axis_name`: the axis of `jax.pmap` or `jax.shard_map`, or a tuple of axes, over
        which the batch is divided; one collective takes the maximum of the statistics
        over it. Under `jit` leave it out.

    **Returns:** an `optax.GradientTransformationExtraArgs` whose `update` needs
    `params` and `attention_stats`: a pytree that mirrors the modules, with a leaf
    `<module path>/max_logits` of shape `(heads,)` or `(*stack, heads)` for every
    attention layer, as [`attention_fn`][] sows it. Pass `{}` for a model without
    attention. State: [`QKClipState`][]. Under gradient accumulation use
    [`multi_steps`][]: `optax.MultiSteps` passes on only the statistics of the last
    micro-batch, so that heads with larger logits in another are clipped too little.

    **Raises:** `ValueError` for a threshold that is not positive or an alpha outside
    [0, 1], or an alpha that is not one number; at `init` for schedules that begin
    outside these ranges, for thresholds that do not fit the layers, for logits that no
    scaling of parameters brings to the threshold, and, without `model` and `attention`,
    for attention with other names than stock Flax's (`q_proj`, ...); at the first
    update, naming the paths, for missing params or statistics, for statistics that do
    not fit, and for the state of another optimizer.

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
    rule = ClipRule.checked(threshold, alpha)
    knowledge = knowledge_of(model, attention)
    knowledge.check_clippable(rule.only_watches)

    def init_fn(params: optax.Params) -> QKClipState:
        layout = read_layout(params, shardings, axis_name)
        heads = Heads(layout, knowledge, rule.only_watches)
        first = rule.at(np.int32(0))
        first.check_start(heads.thresholds(first))
        state = QKClipState(
            step=jnp.zeros((), jnp.int32),
            max_logit=jnp.full((), UNKNOWN, jnp.float32),
            num_clipped=jnp.zeros((), jnp.int32),
            num_nonfinite=jnp.zeros((), jnp.int32),
            max_logits=jnp.full(heads.count, UNKNOWN, jnp.float32),
            gamma=jnp.ones(heads.count, jnp.float32),
            last_clip=jnp.full(heads.count, -1, jnp.int32),
        )
        # Replicated here and after each step. Otherwise the first step would change the
        # sharding: `jit` would compile twice, and a program compiled ahead would fail.
        return first_state(state, layout)

    def update_fn(updates, state, params=None, *, attention_stats=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "qk_clip needs the params: tx.update(grads, state, params, ...)"
            )
        check_state("qk_clip", isinstance(state, QKClipState))
        check_fit(updates, params, "update")
        layout = read_layout(params, shardings, axis_name)
        check_replicas(layout.replicas, attention_stats)
        heads = Heads(layout, knowledge, rule.only_watches)
        heads.check_state(state.gamma)
        logits, gamma, scale_at = heads.clip(attention_stats, rule.at(state.step))
        param_at = layout.tree.by_path()
        scaled = [
            _scale_update(x, param_at[path], scale_at[path]) if path in scale_at else x
            for path, x, *_ in layout.of(updates)
        ]
        finite, clipped = jnp.isfinite(logits), gamma < 1
        state = QKClipState(
            step=jnp.asarray(optax.safe_increment(state.step)),
            max_logit=jnp.max(logits, initial=UNKNOWN, where=finite),
            # Under `jax_enable_x64` a sum of int32 is int64, which changes the state.
            num_clipped=jnp.sum(clipped, dtype=jnp.int32),
            num_nonfinite=jnp.sum(~finite, dtype=jnp.int32),
            max_logits=logits,
            gamma=gamma,
            last_clip=jnp.where(clipped, state.step, state.last_clip),
        )
        return layout.tree.unflatten(scaled), replicated(state, layout.mesh)

    return over_replicas(init_fn, update_fn, axis_name)


@explained
def clip_qk(
    params: Params,
    attention_stats: Any,
    threshold: float | jax.Array = 100.0,
    *,
    alpha: float | jax.Array = 0.5,
    model: ModelReading | None = None,
    attention: Attention | None = None,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
) -> Params:
    """Applies QK-Clip to params, for loops that cannot pass extra arguments.

    Call it after the optimizer step with the statistics of the same step.

    **Arguments:**

    - `params`: params after the step.
    - `attention_stats`: as for the update of [`qk_clip`][].
    - all others: as for [`qk_clip`][], but no schedules.

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
    rule = ClipRule.checked(threshold, alpha)
    check_params("clip_qk(params, attention_stats)", params)
    if swapped := read_attention_stats(params):
        raise ValueError(
            f"the params hold the statistics of {show_all(swapped)}: "
            "mc.clip_qk(params, attention_stats), in this order"
        )
    knowledge = knowledge_of(model, attention)
    layout = read_layout(params, shardings, axis_name)
    check_replicas(layout.replicas)
    knowledge.check_clippable(rule.only_watches)
    heads = Heads(layout, knowledge, rule.only_watches)
    *_, scale_at = heads.clip(attention_stats, rule)
    scaled = [
        _scale_weight(x, scale_at[path]) if path in scale_at else x
        for path, x, *_ in layout.leaves
    ]
    return layout.tree.unflatten(scaled)


def states_in(tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Returns the outermost parts of an optimizer's state that are of a `kind`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def _scale_weight(param: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the scaled weight; entries with a scale of 1 keep their bits."""
    wide, scale = np.promote_types(param.dtype, jnp.float32), _sharded_as(param, scale)
    scaled = (param.astype(wide) * scale.astype(wide)).astype(param.dtype)
    return jnp.where(scale == 1, param, scaled)


# Compiled, so that equal leaves are traced once.
@jax.jit
def _scale_update(update: jax.Array, param: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the update to `scale * (param + update)`, which is rounded once."""
    # At least float32: in bfloat16, the difference between a weight and a smaller one
    # is rounded to more than the smaller one's last place. A bfloat16 update made 2,226
    # of 10,000 clipped weights wrong; a float32 update made none wrong.
    wide = np.promote_types(np.promote_types(param.dtype, jnp.float32), update.dtype)
    old, step = param.astype(wide), update.astype(wide)
    scale = _sharded_as(param, scale)
    # Round the target before subtracting the old weight: `optax.apply_updates` rounds
    # old + (target - old), which is then the target itself. But that sum is a multiple
    # of the old weight's last place, 2**-24 of it. A smaller scale would make the head
    # zero for good, although the next step can clip it again. The scale is therefore at
    # least 2**-14, which gives a relative error of 2**-10.
    scale = jnp.maximum(scale, 2**9 * float(jnp.finfo(wide).eps))
    target = ((old + step) * scale.astype(wide)).astype(param.dtype)
    return jnp.where(scale == 1, step, target.astype(wide) - old)


def _sharded_as(param: jax.Array, scale: jax.Array) -> jax.Array:
    """Shards the scale like the weight, as JAX requires on explicit mesh axes."""
    spec = explicit_spec(param)
    is_cut = scale.shape == param.shape and any(spec)
    return resharded(scale, spec, like=param) if is_cut else scale

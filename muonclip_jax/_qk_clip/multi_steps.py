"""Micro-batches: gradients are averaged, the statistics of the heads maximised."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._model.attention_layers import Attention
from .._options import flag, function_or_none, transformation, whole_number
from .._parameters import paths
from .heads import HeadRow, Heads, MappedAxes, maximum_over


class MultiStepsState(NamedTuple):
    """State of [`multi_steps`][].

    - `steps`: that of `optax.MultiSteps`, with the optimizer's inside.
    - `running`: float32, `(all heads,)`; the largest logits since the last real step,
        `-inf` right after one.

    !!! example

        >>> import jax.numpy as jnp, optax
        >>> import muonclip_jax as mc
        >>> state = mc.multi_steps(mc.muonclip(1e-3), 2).init({"w": jnp.ones((2, 3))})
        >>> int(state.steps.mini_step)
        0
    """

    steps: optax.MultiStepsState
    running: jax.Array


def multi_steps(
    opt: optax.GradientTransformation,
    every_k_schedule: int | Callable[[Any], Any],
    use_grad_mean: bool = True,
    should_skip_update_fn: Callable[..., Any] | None = None,
    *,
    attention: Attention | None = None,
    axis_name: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.MultiSteps` for optimizers with [`qk_clip`][] in them.

    Every micro-batch brings its own `attention_stats`; the real step clips once, by
    their maximum. (`optax.MultiSteps` alone hands `qk_clip` the statistics of the last
    micro-batch, and says nothing: heads that grew in the others are clipped too
    little.) Micro-batches that `should_skip_update_fn` rejects do not count.

    **Arguments:**

    - `opt`, `every_k_schedule`, `use_grad_mean`, `should_skip_update_fn`: as for
        `optax.MultiSteps`.
    - `attention`: what `opt` was given.
    - `axis_name`: as for [`qk_clip`][]; that of the `qk_clip` in `opt` if not given.

    **Returns:** an `optax.GradientTransformationExtraArgs`. State:
    [`MultiStepsState`][].

    **Raises:** `ValueError` as [`qk_clip`][] does, at every micro-batch.

    !!! example

        >>> import jax, jax.numpy as jnp, optax
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> zeros = jax.tree.map(jnp.zeros_like, params)
        >>> tx = mc.multi_steps(mc.muonclip(0.0), 2)
        >>> state = tx.init(params)
        >>> for logits in ([90.0, 400.0], [90.0, 90.0]):
        ...     stats = {"attn": {"max_logits": jnp.array(logits)}}
        ...     updates, state = tx.update(zeros, state, params, attention_stats=stats)
        >>> optax.apply_updates(params, updates)["attn"]["query"]["kernel"][0, :, 0]
        Array([1. , 0.5], dtype=float32)
    """
    transformation("opt", opt)
    function_or_none("should_skip_update_fn", should_skip_update_fn)
    if not callable(every_k_schedule):
        every_k_schedule = whole_number("every_k_schedule", every_k_schedule, 1)
    steps = optax.MultiSteps(
        opt,
        every_k_schedule,
        use_grad_mean=flag("use_grad_mean", use_grad_mean),
        should_skip_update_fn=should_skip_update_fn,
    )

    def init_fn(params: optax.Params) -> MultiStepsState:
        heads = Heads(paths.flatten(params), attention)
        nothing = jnp.full(heads.count, -jnp.inf, jnp.float32)
        return MultiStepsState(steps.init(params), nothing)

    def update_fn(updates, state, params=None, *, attention_stats=None, **extra_args):
        if params is None:
            raise ValueError(
                "multi_steps needs the params: tx.update(grads, state, params, ...)"
            )
        heads = Heads(paths.flatten(params), attention)
        logits = heads.read(attention_stats, axis_name)
        row = HeadRow(jnp.maximum(state.running, logits), heads.shapes, MappedAxes())
        # optax divides by an integer, so strict promotion would refuse it.
        with jax.numpy_dtype_promotion("standard"):
            updates, after = steps.update(
                updates, state.steps, params, attention_stats=row, **extra_args
            )
        # Else a checkpoint between micro-batches would keep one replica's alone.
        running = maximum_over(row.logits, row.axes)
        real = after.gradient_step != state.steps.gradient_step
        counted = after.mini_step != state.steps.mini_step
        running = jnp.where(counted, running, state.running)
        return updates, MultiStepsState(after, jnp.where(real, -jnp.inf, running))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

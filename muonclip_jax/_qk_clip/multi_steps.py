"""Micro-batches: averages the gradients and takes the maximum of the statistics.

The paper's S is the largest logit of a step's batch (arXiv:2507.20534, section 2.1), of
all its micro-batches. If statistics were added like gradients, gamma would be too small
by the number of micro-batches; a mean would miss a head that grew in one of them.
"""

from __future__ import annotations  # help() shows aliases by name

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._calls import explained
from .._layout.layout import check_replicas, Layout, OverReplicas, read_layout
from .._layout.shardings import Shardings
from .._layout.state import counts_replicated, replicated, StatePart, zero_parts
from .._model.attention_layers import Attention
from .._model.knowledge import knowledge_of
from .._model.model_reading import ModelReading
from .._options import (
    check_flag,
    check_function_or_none,
    check_number,
    check_state,
    check_transformation,
    check_whole_number,
)
from .heads import Heads, UNKNOWN
from .qk_clip import QKClipState, states_in


class MultiStepsState(NamedTuple):
    """The state of `optax.MultiSteps`, plus the running maximum of the logits.

    - `mini_step`, `gradient_step`, `inner_opt_state`, `acc_grads`, `skip_state`: as in
        `optax.MultiStepsState`.
    - `running`: float32, `(all heads,)`; the largest logits since the last real step,
        the smallest float32 right after one; no heads without an inner [`qk_clip`][].

    !!! example

        >>> import jax.numpy as jnp, optax
        >>> import muonclip_jax as mc
        >>> state = mc.multi_steps(mc.muonclip(1e-3), 2).init({"w": jnp.ones((2, 3))})
        >>> int(state.mini_step)
        0
    """

    mini_step: Any
    gradient_step: Any
    inner_opt_state: Any
    acc_grads: Any
    skip_state: Any
    running: jax.Array


class MultiSteps(optax.GradientTransformationExtraArgs):
    """The result of [`multi_steps`][]."""

    @staticmethod
    def has_updated(state: Any) -> jax.Array:
        """Whether the last micro-batch ended in a real step, as in optax."""
        # An `nnx.Optimizer` holds variables, not arrays.
        done, real = map(jnp.asarray, (state.mini_step, state.gradient_step))
        return (done == 0) & (real > 0)

    def gradient_transformation(self) -> optax.GradientTransformation:
        """Returns itself; optax's `MultiSteps` has to be converted."""
        return self


@explained
def multi_steps(
    opt: optax.GradientTransformation,
    every_k_schedule: int | Callable[[Any], Any],
    use_grad_mean: bool = True,
    should_skip_update_fn: Callable[..., Any] | None = None,
    *,
    model: ModelReading | None = None,
    attention: Attention | None = None,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
    **options: Any,
) -> MultiSteps:
    """`optax.MultiSteps` for optimizers with [`qk_clip`][] in them.

    Each micro-batch has its own `attention_stats`; the real step clips once, by their
    maximum. (`optax.MultiSteps` passes `qk_clip` only the statistics of the last
    micro-batch, without an error: heads with larger logits in another are clipped too
    little.) Micro-batches that `should_skip_update_fn` rejects do not count. `opt` gets
    other arguments of the update unchanged. Without a `qk_clip` in `opt`, statistics
    are not needed.

    **Arguments:**

    - `opt`: an optimizer.
    - `every_k_schedule`: as for `optax.MultiSteps`.
    - `use_grad_mean`: as for `optax.MultiSteps`.
    - `should_skip_update_fn`: as for `optax.MultiSteps`.
    - `model`: as given to `opt`.
    - `attention`: as given to `opt`.
    - `shardings`: as given to `opt`.
    - `axis_name`: as given to `opt`. If `opt` is [`muonclip`][], [`muon`][] or
        [`qk_clip`][] itself, and not a chain, you need not repeat it. Gradients are
        averaged over the replicas before they are accumulated, so that all replicas
        accumulate the same.
    - `options`: other arguments of the installed `optax.MultiSteps`, such as
        `accumulator_dtype`.

    **Returns:** an `optax.GradientTransformationExtraArgs` with optax's
    `has_updated(state)`. State: [`MultiStepsState`][].

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
    check_transformation("opt", opt)
    knowledge = knowledge_of(model, attention)
    check_function_or_none("should_skip_update_fn", should_skip_update_fn)
    every_k: Any = every_k_schedule
    if callable(every_k):
        every_k = check_number("every_k_schedule", every_k, None, "a schedule")
    else:
        every_k = check_whole_number("every_k_schedule", every_k, 1)
    if axis_name is None and isinstance(opt, OverReplicas):
        axis_name = opt.axis_name
    steps = optax.MultiSteps(
        opt,
        every_k,
        use_grad_mean=check_flag("use_grad_mean", use_grad_mean),
        should_skip_update_fn=should_skip_update_fn,
        **options,
    )
    # Optax makes new branches for its condition in each call; an eager call would
    # compile them each time.
    compiled = jax.jit(steps.update)

    def heads_of(layout: Layout, clips: Sequence[QKClipState]) -> Heads:
        # Called only if there is a clip: without one, refused attention is no error.
        heads = Heads(layout, knowledge, only_watches=True)
        if heads.count != clips[0].gamma.size:
            # The clip scales, and watches no others.
            knowledge.check_clippable(only_watches=False)
        return heads

    def init_fn(params: optax.Params) -> MultiStepsState:
        layout = read_layout(params, shardings, axis_name)
        first = steps.init(params)
        clips = states_in(first.inner_opt_state, QKClipState)
        count = heads_of(layout, clips).count if clips else 0
        # Optax's own zeros do not depend on the params, so `jit` would not know how to
        # shard them.
        parts = [
            StatePart(leaf.path, getattr(leaf.array, "dtype", None))
            for leaf in layout.of(first.acc_grads)
        ]
        first = first._replace(
            acc_grads=layout.tree.unflatten(zero_parts(params, layout, parts))
        )
        mesh = layout.mesh
        nothing = replicated(jnp.full(count, UNKNOWN, jnp.float32), mesh)
        state = MultiStepsState(**first._asdict(), running=nothing)
        return counts_replicated(state, mesh)

    def update_fn(updates, state, params=None, *, attention_stats=None, **extra_args):
        check_state("multi_steps", isinstance(state, MultiStepsState))
        *rest, running = state
        before = optax.MultiStepsState(*rest)
        clips = states_in(before.inner_opt_state, QKClipState)
        layout = read_layout(
            updates if params is None else params, shardings, axis_name
        )
        check_replicas(layout.replicas)
        largest = running
        if clips:
            heads = heads_of(layout, clips)
            heads.check_state(running)
            largest = heads.read(attention_stats)
            # Not `both` at first: a head that sees no key has -inf, below UNKNOWN.
            both = jnp.maximum(running, largest)
            largest = jnp.where(before.mini_step == 0, largest, both)
            attention_stats = heads.combined(largest)
        # Average in every micro-batch, not only in the real step. Otherwise sums would
        # differ by replica, and a checkpoint would keep one replica's. If one replica
        # skipped a micro-batch, the others would wait in the real step's collective.
        updates = layout.averaged(updates)
        # Other arguments of `opt` may be strings, flags or functions, which `jit` does
        # not accept. Then call optax directly, which traces only arrays.
        others = jax.tree.leaves(extra_args)
        is_traced = all(isinstance(x, jax.Array) for x in others)
        update = compiled if is_traced else steps.update
        if attention_stats is not None:
            extra_args["attention_stats"] = attention_stats
        # Strict promotion would refuse optax's division by an integer.
        with jax.numpy_dtype_promotion("standard"):
            updates, after = update(updates, before, params, **extra_args)
        # Optax's counters show what it did with the micro-batch: `mini_step` stays if
        # it was skipped, and restarts after a real step.
        counted = after.mini_step != before.mini_step
        running = jnp.where(counted, largest, running)
        real = after.gradient_step != before.gradient_step
        running = jnp.where(real, UNKNOWN, running)
        running = replicated(running, layout.mesh)
        return updates, MultiStepsState(**after._asdict(), running=running)

    return MultiSteps(init_fn, update_fn)

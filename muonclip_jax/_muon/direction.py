"""Gradients to momentum, momentum orthogonalized, and that scaled by shape."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .leaves import Leaves
from .momentum import Momentum
from .orthogonalize import orthogonalize


def muon_direction(
    read: Callable[[Any], Leaves],
    momentum: Momentum,
    solver: Solver,
    *,
    consistent_rms: ArrayLike | None,
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_muon` for leaves that `read` has read; those without a view pass."""

    def init_fn(params: optax.Params) -> Any:
        return momentum.init(params, read(params))

    def update_fn(updates, state: Any, params=None, **extra_args) -> tuple[Any, Any]:
        del params, extra_args
        leaves = read(updates)
        tree, views, *_ = leaves
        gradients = tree.of(updates)
        # A leaf without entries has nothing to orthogonalize and no scale.
        views = [view if view and math.prod(view.shape) else None for view in views]
        ahead, state = momentum.update(state, leaves, views, gradients)
        placement = leaves.placement(ahead)
        directions = orthogonalize(solver, ahead, views, placement)
        scaled = [
            _scale_by_shape(d, view, consistent_rms).astype(g.dtype) if view else d
            for d, view, g in zip(directions, views, gradients, strict=True)
        ]
        return tree.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _scale_by_shape(
    direction: jax.Array, view: MatrixView, consistent_rms: ArrayLike | None
) -> jax.Array:
    if consistent_rms is None:
        scale = math.sqrt(max(1.0, view.fan_out / view.fan_in))
    else:
        scale = consistent_rms * math.sqrt(max(view.fan_in, view.fan_out))
    return direction * jnp.asarray(scale, direction.dtype)

"""Gradients to momentum, momentum orthogonalized, and that scaled by shape."""

import math
from typing import Any

import optax

from .._newton_schulz.solver import Solver
from .leaves import check_directed, Leaves, NO_STATE
from .momentum import Momentum, ScaleByMuonState
from .orthogonalize import orthogonalize
from .shape_scale import depends_on_direction, scale_by_shape, ShapeScale


def muon_direction(
    leaves: Leaves,
    momentum: Momentum,
    solver: Solver,
    *,
    consistent_rms: ShapeScale,
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_muon` for leaves that were read; those without a view pass."""
    if depends_on_direction(consistent_rms):
        check_directed(leaves)

    def init_fn(params: optax.Params) -> Any:
        return momentum.init(params, leaves)

    def update_fn(updates, state: Any, params=None, **extra_args) -> tuple[Any, Any]:
        del params, extra_args
        if not isinstance(state, ScaleByMuonState):
            raise ValueError(NO_STATE.format("scale_by_muon"))
        leaves.check_like("state", state.mu)
        tree, gradients = leaves.tree, leaves.tree.of(updates)
        # A leaf without entries has nothing to orthogonalize and no scale.
        views = [
            view if view and math.prod(view.shape) else None for view in leaves.views
        ]
        ahead, state = momentum.update(state, leaves, views, gradients)
        layout = leaves.layout
        layout.check_types(ahead)
        directions = orthogonalize(
            solver,
            ahead,
            views,
            layout.placement(ahead),
            layout.cuts,
            layout.replicas,
        )
        scaled = [
            scale_by_shape(d, view, consistent_rms).astype(g.dtype) if view else d
            for d, view, g in zip(directions, views, gradients, strict=True)
        ]
        return tree.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

"""Gradients to momentum, momentum orthogonalized, and that scaled by shape."""

import math
from typing import Any

import optax

from .._mesh.replicas import Axes, check_same_on_replicas
from .._mesh.unknown import warn_of_unknown
from .._newton_schulz.solver import Solver
from .leaves import Leaves, NO_STATE
from .momentum import Momentum, ScaleByMuonState
from .orthogonalize import orthogonalize
from .shape_scale import scale_by_shape, ShapeScale


def muon_direction(
    leaves: Leaves,
    momentum: Momentum,
    solver: Solver,
    *,
    consistent_rms: ShapeScale,
    replicas: Axes,
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_muon` for leaves that were read; those without a view pass."""

    def init_fn(params: optax.Params) -> Any:
        return momentum.init(params, leaves)

    def update_fn(updates, state: Any, params=None, **extra_args) -> tuple[Any, Any]:
        del params, extra_args
        if not isinstance(state, ScaleByMuonState):
            raise ValueError(NO_STATE.format("scale_by_muon"))
        leaves.check_like("state", state.mu)
        tree, views, *_ = leaves
        gradients = tree.of(updates)
        # A leaf without entries has nothing to orthogonalize and no scale.
        views = [view if view and math.prod(view.shape) else None for view in views]
        ahead, state = momentum.update(state, leaves, views, gradients)
        check_same_on_replicas(tree, ahead, leaves.cuts, replicas)
        placement = leaves.placement(ahead)
        warn_of_unknown(tree.paths, views, placement)
        network = leaves.layouts.network(placement)
        directions = orthogonalize(
            solver, ahead, views, placement, leaves.cuts, replicas, network
        )
        scaled = [
            scale_by_shape(d, view, consistent_rms).astype(g.dtype) if view else d
            for d, view, g in zip(directions, views, gradients, strict=True)
        ]
        return tree.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

"""Gradients to momentum, momentum orthogonalized, and that scaled by shape."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from .._matrices.view import MatrixView
from .._mesh.placement import find_placement
from .._newton_schulz.solver import Solver
from .leaves import Leaves
from .orthogonalize import orthogonalize


class ScaleByMuonState(NamedTuple):
    """State of [`scale_by_muon`][]: nothing but the momentum."""

    mu: optax.Updates  # like params, in mu_dtype


def muon_direction(
    read: Callable[[Any], Leaves],
    solver: Solver,
    *,
    beta: ArrayLike,
    nesterov: bool,
    consistent_rms: ArrayLike | None,
    mu_dtype: DTypeLike | None,
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_muon` for leaves that `read` has read; those without a view pass."""

    def init_fn(params: optax.Params) -> ScaleByMuonState:
        leaves = read(params)
        find_placement(leaves.tree.paths, leaves.tree.of(params), leaves.shardings)
        return ScaleByMuonState(mu=optax.tree.zeros_like(params, dtype=mu_dtype))

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        (tree, views, shardings) = read(updates)
        gradients = tree.of(updates)
        pairs = [
            _accumulate(beta, m, g, nesterov) if view else (m, g)
            for m, g, view in zip(tree.of(state.mu), gradients, views, strict=True)
        ]
        mu, momentum = zip(*pairs, strict=True) if pairs else ((), ())
        placement = find_placement(tree.paths, momentum, shardings)
        directions = orthogonalize(solver, momentum, views, placement)
        scaled = [
            (d * _shape_scale(view, consistent_rms)).astype(g.dtype) if view else d
            for d, view, g in zip(directions, views, gradients, strict=True)
        ]
        return tree.unflatten(scaled), ScaleByMuonState(mu=tree.unflatten(mu))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@functools.partial(jax.jit, static_argnames="nesterov")
def _accumulate(
    beta: ArrayLike, momentum: jax.Array, gradient: jax.Array, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """The momentum to keep and the one to orthogonalize."""
    momentum = _decay(beta, momentum, gradient)
    return momentum, _decay(beta, momentum, gradient) if nesterov else momentum


def _decay(beta: ArrayLike, momentum: jax.Array, gradient: jax.Array) -> jax.Array:
    return jnp.asarray(beta * momentum + gradient, momentum.dtype)


def _shape_scale(view: MatrixView, consistent_rms: ArrayLike | None) -> ArrayLike:
    if consistent_rms is None:
        return math.sqrt(max(1.0, view.fan_out / view.fan_in))
    return consistent_rms * math.sqrt(max(view.fan_in, view.fan_out))

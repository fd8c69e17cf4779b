"""Gradients to momentum, momentum orthogonalized, and that scaled by shape."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from .._matrices.view import MatrixView
from .._mesh.zeros import zeros_like_params
from .._newton_schulz.solver import Solver
from .leaves import Leaves
from .orthogonalize import orthogonalize


class ScaleByMuonState(NamedTuple):
    """State of [`scale_by_muon`][]: nothing but the momentum.

    The sum of `M = beta*M + G`, but in float16 the average `(1 - beta)*M`, which cannot
    overflow and has the same direction.
    """

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
        (mu,) = zeros_like(params, read(params), mu_dtype)
        return ScaleByMuonState(mu=mu)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        leaves = read(updates)
        tree, views, *_ = leaves
        gradients = tree.of(updates)
        # A leaf without entries has nothing to orthogonalize and no scale.
        views = [view if view and math.prod(view.shape) else None for view in views]
        pairs = [
            _accumulate(beta, m, g, nesterov) if view else (m, g)
            for m, g, view in zip(tree.of(state.mu), gradients, views, strict=True)
        ]
        mu, momentum = zip(*pairs, strict=True) if pairs else ((), ())
        placement = leaves.placement(momentum)
        directions = orthogonalize(solver, momentum, views, placement)
        scaled = [
            _scale_by_shape(d, view, consistent_rms).astype(g.dtype) if view else d
            for d, view, g in zip(directions, views, gradients, strict=True)
        ]
        return tree.unflatten(scaled), ScaleByMuonState(mu=tree.unflatten(mu))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def zeros_like(
    params: optax.Params, leaves: Leaves, *dtypes: DTypeLike | None
) -> list[Any]:
    """Zeros of each dtype that lie as the params do, wherever that is known."""
    tree, owners = leaves.tree, leaves.tree.of(params)
    placement = leaves.placement(owners)
    leaves.layouts.remember(tree.paths, owners, placement)
    return [tree.unflatten(zeros_like_params(owners, placement, x)) for x in dtypes]


@functools.partial(jax.jit, static_argnames="nesterov")
def _accumulate(
    beta: ArrayLike, momentum: jax.Array, gradient: jax.Array, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """The momentum to keep and the one to orthogonalize."""
    dtype = momentum.dtype
    wide = np.promote_types(np.promote_types(dtype, jnp.float32), gradient.dtype)
    beta, gradient = jnp.asarray(beta, wide), gradient.astype(wide)
    if dtype == jnp.float16:
        # A sum of what fits into float16 need not fit; an average does.
        gradient = (1 - beta) * gradient

    def decay(momentum: jax.Array) -> jax.Array:
        return (beta * momentum.astype(wide) + gradient).astype(dtype)

    momentum = decay(momentum)
    return momentum, decay(momentum) if nesterov else momentum


def _scale_by_shape(
    direction: jax.Array, view: MatrixView, consistent_rms: ArrayLike | None
) -> jax.Array:
    if consistent_rms is None:
        scale = math.sqrt(max(1.0, view.fan_out / view.fan_in))
    else:
        scale = consistent_rms * math.sqrt(max(view.fan_in, view.fan_out))
    return direction * jnp.asarray(scale, direction.dtype)

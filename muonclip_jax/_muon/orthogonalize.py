"""Orthogonalizes leaves of matrices, wherever they are: four routes, one choice."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._layout.layout import Cuts, on_whole_blocks, shared_axes
from .._layout.placement import Placement
from .._matrices.view import MatrixView
from .._mesh.by_constraint import orthogonalize_by_constraint
from .._mesh.on_mesh import orthogonalize_by_replicas, orthogonalize_on_mesh
from .._newton_schulz.explicit_axes import on_automatic_axes, on_whole_leaves
from .._newton_schulz.on_its_platform import on_its_platform
from .._newton_schulz.solver import Solver
from .one_device import orthogonalize_on_one_device


#: From a solver and leaves to the leaves, orthogonal.
Route = Callable[[Solver, list[jax.Array]], list[jax.Array]]


def orthogonalize(
    solver: Solver,
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView | None],
    placement: Placement | None = None,
    cuts: Cuts | None = None,
    replicas: tuple[Any, ...] = (),
) -> list[jax.Array]:
    """Orthogonalizes every leaf that has a view; others pass through.

    Matrices of one shape share a stack, whichever leaves they come from. On a mesh its
    devices share the work, and so do replicas along mapped axes and devices that hold
    blocks of leaves inside `jax.shard_map`. Results are float32 or wider.
    """
    results = list(leaves)
    cuts = cuts or (PartitionSpec(),) * len(leaves)
    specs = placement.specs if placement else [None] * len(leaves)
    seen = [i for i, view in enumerate(views) if view]
    for is_known in (True, False):
        chosen = [i for i in seen if (specs[i] is not None) == is_known]
        if not chosen:
            continue
        found = _orthogonalize(
            solver,
            [leaves[i] for i in chosen],
            views=tuple(views[i] for i in chosen),
            mesh=placement and placement.mesh,
            specs=tuple(specs[i] for i in chosen) if is_known else None,
            cuts=tuple(cuts[i] for i in chosen),
            replicas=replicas,
        )
        for i, result in zip(chosen, found, strict=True):
            results[i] = result
    return results


@functools.partial(
    jax.jit, static_argnames=("views", "mesh", "specs", "cuts", "replicas")
)
def _orthogonalize(solver, leaves, *, views, mesh, specs, cuts, replicas):
    of_whole = functools.partial(orthogonalize_on_one_device, views=views)

    def alone(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
        """Every device by itself, for leaves that explicit axes of a mesh may shard."""
        return on_whole_leaves(functools.partial(of_whole, solver), leaves)

    if shared := shared_axes(cuts, replicas):
        # Devices that mapped axes tell apart: replicas, or holders of blocks.
        together = functools.partial(
            orthogonalize_by_replicas, views=views, cuts=cuts, axes=shared
        )

        def by_replicas(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
            return on_automatic_axes(functools.partial(together, solver), leaves)

        route = _differentiable(
            by_replicas, functools.partial(on_whole_blocks, alone, cuts)
        )
    elif mesh is None:
        route = alone
    elif specs is None:
        # Automatic axes, and nobody says how they shard the leaves.
        by_constraint = functools.partial(
            orthogonalize_by_constraint, views=views, mesh=mesh
        )
        route = _differentiable(by_constraint, alone)
    else:
        on_mesh = functools.partial(
            orthogonalize_on_mesh, views=views, mesh=mesh, specs=specs
        )
        route = _differentiable(on_mesh, alone)
    return on_its_platform(route, solver, leaves)


def _differentiable(route: Route, alone: Route) -> Route:
    """`route` with the derivative of what one device does, which XLA partitions.

    Exchanges and loops of a length known at run time have no derivative.
    """
    result = jax.custom_jvp(lambda solver, leaves: route(solver, leaves))

    @result.defjvp
    def derivative(primals, tangents):
        solver, leaves = primals
        _, directions = jax.jvp(
            functools.partial(alone, solver), (leaves,), (tangents[1],)
        )
        return result(solver, leaves), directions

    return result

"""Orthogonalizes leaves of matrices, wherever they lie: four routes, one choice."""

import functools
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from .._matrices.view import MatrixView
from .._mesh.cuts import cut_axes, Cuts, on_whole_blocks
from .._mesh.network import ANY_NETWORK, Network
from .._mesh.on_mesh import orthogonalize_on_mesh
from .._mesh.placement import Placement
from .._mesh.replicas import Axes, orthogonalize_by_replicas
from .._newton_schulz.on_its_platform import on_its_platform
from .._newton_schulz.solver import Solver
from .custom_partition import orthogonalize_where_compiler_puts
from .one_device import orthogonalize_on_one_device
from .transformed import differentiable, transformable


def orthogonalize(
    solver: Solver,
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView | None],
    placement: Placement | None = None,
    cuts: Cuts | None = None,
    replicas: Axes = (),
    network: Network = ANY_NETWORK,
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
            network=network,
        )
        for i, result in zip(chosen, found, strict=True):
            results[i] = result
    return results


@functools.partial(
    jax.jit, static_argnames=("views", "mesh", "specs", "cuts", "replicas", "network")
)
def _orthogonalize(solver, leaves, *, views, mesh, specs, cuts, replicas, network):
    if replicas or any(map(cut_axes, cuts)):
        # No rule for `vmap`, which may be what names the axis of the replicas.
        of_all = functools.partial(orthogonalize_on_one_device, views=views)
        route = differentiable(
            functools.partial(
                orthogonalize_by_replicas, views=views, cuts=cuts, axes=replicas
            ),
            functools.partial(on_whole_blocks, of_all, cuts),
        )
    elif mesh is None:
        route = functools.partial(orthogonalize_on_one_device, views=views)
    elif specs is None:
        found_later = orthogonalize_where_compiler_puts
        route = transformable(
            functools.partial(found_later, network=network), views, None
        )
    else:
        on_mesh = functools.partial(orthogonalize_on_mesh, mesh=mesh, network=network)
        route = transformable(on_mesh, views, specs)
    return on_its_platform(route, solver, leaves)

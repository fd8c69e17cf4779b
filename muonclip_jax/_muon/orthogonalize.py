"""Leaves of matrices are orthogonalized, wherever they lie."""

import functools
from collections.abc import Sequence

import jax

from .._matrices.view import MatrixView
from .._mesh.on_mesh import orthogonalize_on_mesh
from .._mesh.placement import Placement
from .._newton_schulz.options import Options
from .._newton_schulz.platforms import on_its_platform
from .custom_partition import orthogonalize_by_compiler
from .one_device import orthogonalize_on_one_device


def orthogonalize(
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView | None],
    options: Options,
    ns_steps: jax.Array | None = None,
    placement: Placement | None = None,
) -> list[jax.Array]:
    """Orthogonalizes every leaf that has a view; others pass through.

    Matrices of one shape share a stack, whichever leaves they come from. `ns_steps` is
    the number of steps where it is traced. On a mesh its devices share the work.
    Results are float32 or wider.
    """
    results = list(leaves)
    specs = placement.specs if placement else [None] * len(leaves)
    seen = [i for i, view in enumerate(views) if view]
    for is_known in (True, False):
        chosen = [i for i in seen if (specs[i] is not None) == is_known]
        if not chosen:
            continue
        found = _orthogonalize(
            [leaves[i] for i in chosen],
            ns_steps,
            views=tuple(views[i] for i in chosen),
            options=options,
            mesh=placement and placement.mesh,
            specs=tuple(specs[i] for i in chosen) if is_known else None,
        )
        for i, result in zip(chosen, found, strict=True):
            results[i] = result
    return results


@functools.partial(jax.jit, static_argnames=("views", "options", "mesh", "specs"))
def _orthogonalize(leaves, ns_steps, *, mesh, specs, **static):
    if mesh is None:
        function = orthogonalize_on_one_device
    elif specs is None:
        function = orthogonalize_by_compiler
    else:
        function = functools.partial(orthogonalize_on_mesh, mesh=mesh, specs=specs)
    return on_its_platform(functools.partial(function, **static), leaves, ns_steps)

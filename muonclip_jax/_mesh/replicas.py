"""Orthogonalization by devices that `pmap` and `shard_map` tell apart.

Replicas hold the same leaves: each iterates its share of the matrices, and one gather
for each stack hands out all. Devices along an axis that cuts a leaf hold blocks of it.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from .._jax_versions import is_checked, manual_axes, varying
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .._parameters.paths import PathedTree, show
from .cuts import axis_sizes, cut_axes, Cuts
from .on_mesh import orthogonalize_on_each_device


#: Names of mapped axes.
Axes = tuple[Hashable, ...]


def named_axes(axis_name: Hashable | None) -> Axes:
    """One name, several or none."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def mean_over_replicas(gradients: Sequence[Any], cuts: Cuts, axes: Axes) -> list[Any]:
    """The mean of each leaf over the axes that do not cut it.

    It is not taken where leaves are known to be the same on all replicas.

    **Raises:** `ValueError` where there is no such axis.
    """
    _check_bound(axes)

    def mean(along: Axes, x: Any) -> Any:
        if is_checked(along):
            along = tuple(axis for axis in along if axis in manual_axes(x))
        return jax.lax.pmean(x, along) if along else x

    alongs = [tuple(a for a in axes if a not in cut_axes(cut)) for cut in cuts]
    return [
        jax.tree.map(functools.partial(mean, along), gradient) if along else gradient
        for gradient, along in zip(gradients, alongs, strict=True)
    ]


def check_same_on_replicas(
    tree: PathedTree, leaves: Sequence[Any], cuts: Cuts, axes: Axes
) -> None:
    """Raises for leaves that types know to differ along an axis that shares work."""
    shared = set(_shared_axes(cuts, axes))
    for path, leaf, cut in zip(tree.paths, leaves, cuts, strict=True):
        if not isinstance(leaf, jax.Array):
            continue
        along = shared.intersection(manual_axes(leaf)).difference(cut_axes(cut))
        if along:
            raise ValueError(
                f"'{show(path)}' differs along {sorted(map(str, along))}: say in "
                "shardings how they cut it, or name them in axis_name, over which "
                "gradients are averaged"
            )


def orthogonalize_by_replicas(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    cuts: Cuts,
    axes: Axes,
) -> list[jax.Array]:
    """Orthogonalizes leaves that are the same along all axes that do not cut them."""
    shared = _shared_axes(cuts, axes)
    if is_checked(shared):
        leaves = [varying(x, shared) for x in leaves]
    return orthogonalize_on_each_device(
        solver, leaves, views=views, mesh=axis_sizes(shared), specs=cuts
    )


def _shared_axes(cuts: Cuts, axes: Axes) -> Axes:
    """The axes along which devices share the work."""
    return tuple(dict.fromkeys((*axes, *(a for cut in cuts for a in cut_axes(cut)))))


def _check_bound(axes: Axes) -> None:
    for axis in axes:
        try:
            jax.lax.axis_size(axis)
        except NameError as error:
            raise ValueError(
                f"axis_name={axis!r} is no axis here: call the update inside "
                "jax.pmap or jax.shard_map over it, or leave axis_name out"
            ) from error

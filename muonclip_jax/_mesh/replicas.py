"""Orthogonalization by replicas that hold the same leaves: `pmap` and `shard_map`.

Each iterates its share of the matrices, and one gather for each stack hands out all.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._jax_versions import is_checked, manual_axes, varying
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .on_mesh import orthogonalize_on_each_device


#: Names of mapped axes.
Axes = tuple[Hashable, ...]


def named_axes(axis_name: Hashable | None) -> Axes:
    """One name, several or none."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def mean_over_replicas(tree: Any, axes: Axes) -> Any:
    """The mean of each leaf, unless it is known to be the same on all replicas.

    **Raises:** `ValueError` where there is no such axis.
    """
    if not axes:
        return tree
    _check_bound(axes)
    checked = is_checked(axes)

    def mean(x: jax.Array) -> jax.Array:
        is_same = checked and not manual_axes(x).intersection(axes)
        return x if is_same else jax.lax.pmean(x, axes)

    return jax.tree.map(mean, tree)


def orthogonalize_by_replicas(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    axes: Axes,
) -> list[jax.Array]:
    """Orthogonalizes leaves that are the same on all replicas, as are the results."""
    sizes: dict[Any, int] = {axis: jax.lax.axis_size(axis) for axis in axes}
    if is_checked(axes):
        leaves = [varying(x, axes) for x in leaves]
    return orthogonalize_on_each_device(
        solver,
        leaves,
        views=views,
        mesh=sizes,
        specs=[PartitionSpec()] * len(leaves),
    )


def _check_bound(axes: Axes) -> None:
    for axis in axes:
        try:
            jax.lax.axis_size(axis)
        except NameError as error:
            raise ValueError(
                f"axis_name={axis!r} is no axis here: call the update inside "
                "jax.pmap or jax.shard_map over it, or leave axis_name out"
            ) from error

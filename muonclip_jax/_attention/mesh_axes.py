"""Axes of a mesh: manual ones that arrays vary over, explicit ones made automatic."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


#: The axes of a query that attention's output and its statistic have.
OUTPUT, STATISTIC = slice(None, -1), slice(-2, -1)


def vary_as(tree: Any, like: Any) -> Any:
    """Typed as varying over every manual axis that an array of `like` varies over.

    A loop carries arrays of one type. Transposed, this sums the gradient of what was
    the same on all devices.
    """
    axes = {axis for x in jax.tree.leaves(like) for axis in manual_axes(x)}

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - manual_axes(x)))
        return jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(vary, tree) if axes else tree


def manual_axes(x: jax.Array) -> frozenset[str]:
    """Those that it varies over, where `jax.shard_map` checks that."""
    return jax.typeof(x).mat.varying


def on_automatic_axes(
    function: Callable[..., Any], query: jax.Array, *arguments: Any, results: Any
) -> Any:
    """Leaves to XLA what of the mesh is explicit; results lie as the query's axes do.

    Heads that share a key, and blocks cut from an axis, have no explicit sharding.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves((query, arguments))]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(*arguments)
    spec = jax.typeof(query).sharding.spec
    placed = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*spec[axes])), results
    )
    automatic = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=placed
    )
    return automatic(*arguments)

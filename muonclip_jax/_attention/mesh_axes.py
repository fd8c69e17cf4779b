"""Axes of a mesh: manual ones that arrays vary over, explicit ones made automatic."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_versions import manual_axes, varying


def vary_as(tree: Any, like: Any) -> Any:
    """Typed as varying over every manual axis that an array of `like` varies over.

    A loop carries arrays of one type. Transposed, this sums the gradient of what was
    the same on all devices.
    """
    axes = {axis for x in jax.tree.leaves(like) for axis in manual_axes(x)}
    return jax.tree.map(lambda x: varying(x, tuple(sorted(axes))), tree)


class Layout(NamedTuple):
    """How results lie on explicit axes: as the query's of the same meaning."""

    output: PartitionSpec  # (batch..., length, heads, value_dim)
    log_total: PartitionSpec  # (batch..., heads, length)
    statistic: PartitionSpec  # (heads,)


def layout_of(query: jax.Array) -> Layout:
    *batch, length, heads, _ = explicit_spec(query)
    return Layout(
        PartitionSpec(*batch, length, heads, None),
        PartitionSpec(*batch, heads, length),
        PartitionSpec(heads),
    )


def explicit_spec(x: jax.Array) -> PartitionSpec:
    return jax.typeof(x).sharding.spec


def on_automatic_axes(
    function: Callable[..., Any], *arguments: Any, results: Any
) -> Any:
    """Leaves to XLA what of the mesh is explicit; `results` says how those lie.

    Heads that share a key, and blocks cut from an axis, have no explicit sharding.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return function(*arguments)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), results)
    automatic = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=placed
    )
    return automatic(*arguments)

"""Leaves inside `jax.shard_map` that are blocks, cut along axes of the mesh."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._parameters.paths import is_masked, Path, PathedTree, show
from .placement import mesh_axes


#: How axes that are manual here cut each leaf; `PartitionSpec()` if it is whole.
Cuts = tuple[PartitionSpec, ...]


def cuts_here(tree: PathedTree, given: Sequence[Any]) -> Cuts:
    """What `shardings` says of the axes of the `jax.shard_map` around this, if any.

    **Raises:** `ValueError`, naming the path, for axes that the mesh lacks and for more
    entries than the leaf has axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    }
    if not manual:
        return (PartitionSpec(),) * len(given)
    entries = zip(tree.paths, tree.leaves, given, strict=True)
    return tuple(_cut(*entry, mesh, manual) for entry in entries)


def cut_axes(
    cut: PartitionSpec, along: Collection[int] | None = None
) -> tuple[str, ...]:
    """The axes of the mesh that cut a leaf, or some of its axes."""
    entries = [x for i, x in enumerate(cut) if along is None or i in along]
    return tuple(name for entry in entries for name in mesh_axes(entry))


def with_whole_leaves(tree: PathedTree, cuts: Cuts) -> PathedTree:
    """The tree with the shapes that blocks have when they are put together."""
    whole = [
        _whole(leaf, cut) if cut_axes(cut) else leaf
        for leaf, cut in zip(tree.leaves, cuts, strict=True)
    ]
    return tree._replace(leaves=tuple(whole))


def on_whole_blocks(
    function: Callable[[Any, list], list], cuts: Cuts, argument: Any, blocks: list
) -> list[jax.Array]:
    """`function(argument, leaves)` by every device for whole leaves, cut again."""
    whole = [_gathered(*pair) for pair in zip(blocks, cuts, strict=True)]
    results = function(argument, whole)
    return [_own_block(*pair) for pair in zip(results, cuts, strict=True)]


def _gathered(x: jax.Array, cut: PartitionSpec) -> jax.Array:
    for axis, entry in enumerate(cut):
        if names := mesh_axes(entry):
            x = jax.lax.all_gather(x, names, axis=axis, tiled=True)
    return x


def _own_block(x: jax.Array, cut: PartitionSpec) -> jax.Array:
    for axis, entry in enumerate(cut):
        if names := mesh_axes(entry):
            size = x.shape[axis] // math.prod(axis_sizes(names).values())
            start = jax.lax.axis_index(names) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


def axis_sizes(names: Sequence[Any]) -> Mapping[Any, int]:
    return {name: jax.lax.axis_size(name) for name in names}


def _cut(path: Path, leaf: Any, given: Any, mesh: Any, manual: set[str]):
    if given is None or is_masked(leaf):
        return PartitionSpec()
    spec = given.spec if isinstance(given, NamedSharding) else given
    absent = [name for name in cut_axes(spec) if name not in mesh.axis_names]
    if absent or len(spec) > len(leaf.shape):
        reason = (
            f"names axes that its mesh lacks: {absent}"
            if absent
            else ("has too many entries")
        )
        raise ValueError(
            f"the sharding {spec} of '{show(path)}' of shape {tuple(leaf.shape)} "
            f"{reason}; the mesh has the axes {mesh.axis_names}"
        )
    return PartitionSpec(*(_manual(entry, manual) for entry in spec))


def _manual(entry: Any, manual: set[str]) -> tuple[str, ...] | None:
    return tuple(name for name in mesh_axes(entry) if name in manual) or None


def _whole(leaf: Any, cut: PartitionSpec) -> jax.ShapeDtypeStruct:
    factors = [math.prod(axis_sizes(mesh_axes(entry)).values()) for entry in cut]
    factors += [1] * (len(leaf.shape) - len(factors))
    shape = tuple(a * b for a, b in zip(leaf.shape, factors, strict=True))
    return jax.ShapeDtypeStruct(shape, leaf.dtype)

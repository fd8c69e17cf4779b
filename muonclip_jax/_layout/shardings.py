"""On which mesh leaves are, and how its axes shard them, as far as it is known."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._matrices.stacks import MatrixView
from .._parameters.given import broadcast
from .._parameters.paths import is_function, is_masked, Path, PathedTree, show
from .._parameters.verdict import Verdict


#: A tree of `NamedSharding` or `PartitionSpec`, a prefix of one, or a function that
#: makes one from the parameters.
Shardings = Any | Callable[[Any], Any]


class PlacedLeaf(NamedTuple):
    """A leaf of a tree: where it is, and, once that is read, which matrices it holds.

    - `array`: the array at hand, a block where mapped axes cut the leaf, or the
        `MaskedNode` that hides it.
    - `whole`: an array or a shape, of the whole leaf.
    - `given`: its entry in `shardings=`, or `None`.
    - `cut`: how mapped axes cut it; `PartitionSpec()` if it is whole.
    - `mesh`, `spec`: how a mesh shards it, as `Layout.on_mesh` finds; `None` if nobody
        said.
    - `view`: of the whole leaf; `None` if it is hidden or holds no matrix.
    """

    path: Path
    array: Any
    whole: Any
    given: Any
    cut: PartitionSpec
    mesh: Any = None
    spec: PartitionSpec | None = None
    view: MatrixView | None = None
    verdict: Verdict | None = None


class _Block:
    """A leaf inside `jax.shard_map`, for functions that make shardings.

    The whole shape follows from the sharding, so the sharding cannot follow from it.
    """

    def __init__(self, leaf: Any):
        self.ndim, self.dtype = len(leaf.shape), leaf.dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(
            f"shardings is a function that reads .{name} of the params, but inside "
            "jax.shard_map leaves are blocks, without the shapes of the whole arrays: "
            "call the function outside, and pass the tree that it returns"
        )


def given_shardings(
    shardings: Shardings | None, tree: PathedTree, *, of_blocks: bool = False
) -> list[Any]:
    """Returns the entry of `shardings` for each leaf, whichever way it was given."""
    if shardings is None:
        return [None] * len(tree.leaves)
    if is_function(shardings) and not isinstance(shardings, PartitionSpec | Mesh):
        params = tree.leaves
        if of_blocks:
            params = [x if is_masked(x) else _Block(x) for x in params]
        shardings = shardings(tree.unflatten(params))
    return broadcast(
        shardings,
        tree,
        name="shardings",
        is_entry=lambda x: isinstance(x, NamedSharding | PartitionSpec),
        expected="a jax.sharding.NamedSharding, a PartitionSpec such as P('fsdp')",
    )


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a `PartitionSpec`, the major one first."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def along(axes: Collection[Any], spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec with only some axes of the mesh."""
    entries = (tuple(n for n in mesh_axes(e) if n in axes) for e in spec)
    return PartitionSpec(*(names or None for names in entries))


def but_along(axes: Collection[int], spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of an array that is whole along some of its axes."""
    return PartitionSpec(*(None if i in axes else x for i, x in enumerate(spec)))


def blocks_along(
    shape: Sequence[int], spec: PartitionSpec, mesh: Mapping[Any, int]
) -> list[tuple[int, int]]:
    """Returns the size of each axis, and the number of blocks along it.

    `mesh` has sizes by name.
    """
    # A spec may have fewer entries than the array has axes; the others are whole.
    return [
        (size, math.prod(mesh[name] for name in mesh_axes(entry)))
        for size, entry in itertools.zip_longest(shape, spec)
    ]


def is_sharded_as(x: Any, mesh: Any, spec: PartitionSpec) -> bool:
    """Whether an array is known to be sharded as `spec` says."""
    if isinstance(x, Tracer):
        return False
    x_mesh, x_spec = _sharding_of(x)
    return x_spec is not None and _same(x_mesh, mesh) and _cuts(x_spec) == _cuts(spec)


def locate(leaf: PlacedLeaf, ambient: AbstractMesh | None) -> PlacedLeaf:
    """Returns the leaf with its mesh, by default the `ambient` one, and its spec."""
    path, array, given = leaf.path, leaf.array, leaf.given
    if is_masked(array):
        return leaf
    mesh, spec = _sharding_of(array)
    if given is None:
        return leaf._replace(mesh=mesh or ambient, spec=spec)
    if isinstance(given, NamedSharding):
        wanted = given.mesh, given.spec
    else:
        wanted = (mesh or ambient), given
    if wanted[0] is None:
        raise ValueError(
            f"shardings gives {given} for '{show(path)}', but there is no mesh: "
            "call jax.set_mesh, or give a jax.sharding.NamedSharding"
        )
    check_spec(path, array.shape, wanted[1], wanted[0])
    blocks = blocks_along(array.shape, wanted[1], wanted[0].shape)
    if any(size % count for size, count in blocks):
        raise ValueError(
            f"the sharding {wanted[1]} of '{show(path)}' of shape {tuple(array.shape)} "
            f"does not divide it evenly on {_show(wanted[0])}"
        )
    _check_agree(path, array, (mesh, spec), wanted)
    return leaf._replace(mesh=wanted[0], spec=wanted[1])


def _sharding_of(leaf: jax.Array) -> tuple[Any, PartitionSpec | None]:
    # An abstract param may have no sharding.
    typed = jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf
    sharding = getattr(typed, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None, None
    # The spec in the type of a tracer leaves out automatic axes: an empty one does not
    # say that the leaf is replicated.
    if isinstance(leaf, Tracer) and AxisType.Explicit not in sharding.mesh.axis_types:
        return sharding.mesh, None
    return sharding.mesh, sharding.spec


def check_one_mesh(leaves: Sequence[PlacedLeaf]) -> None:
    first, *others = leaves
    for leaf in others:
        if not _same(leaf.mesh, first.mesh):
            raise ValueError(
                f"'{show(first.path)}' and '{show(leaf.path)}' are on different "
                f"meshes: {_show(first.mesh, first.spec)} and "
                f"{_show(leaf.mesh, leaf.spec)}"
            )


def _check_agree(path: Path, x: Any, actual: Any, expected: Any) -> None:
    """Raises if an array is known to be sharded otherwise than the user says."""
    (mesh, spec), (other, wanted) = actual, expected
    # A tracer on a mesh of both kinds of axes shows only the explicit ones.
    traced = mesh.auto_axes if mesh and isinstance(x, Tracer) else ()
    # An axis of one device cuts nothing.
    hidden = {*traced, *(name for name, size in other.shape.items() if size == 1)}
    same_spec = spec is None or _cuts(spec, hidden) == _cuts(wanted, hidden)
    if mesh is not None and not (_same(mesh, other) and same_spec):
        raise ValueError(
            f"shardings says {_show(other, wanted)} for '{show(path)}', which "
            f"is on {_show(mesh, spec)}"
        )


def check_spec(path: Path, shape: tuple[int, ...], spec: Any, mesh: Any) -> None:
    """Raises for a spec that does not say how a mesh shards an array.

    It does not check that blocks are even, since a block does not show the whole.
    """
    where = f"the sharding {spec} of '{show(path)}' of shape {tuple(shape)}"
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ValueError(
            f"{where} is reduced or unreduced along an axis, which params cannot be: "
            "give only the entries"
        )
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"{where} leaves an axis UNCONSTRAINED: write None for an axis that is "
                "not sharded, or None in place of the spec to leave the whole leaf open"
            )
        if not all(isinstance(name, str) for name in mesh_axes(entry)):
            raise ValueError(
                f"{where} has the entry {entry!r}; expected names of mesh axes, tuples "
                "of names, or None"
            )
    named = [axis for entry in spec for axis in mesh_axes(entry)]
    if absent := [axis for axis in named if axis not in mesh.shape]:
        raise ValueError(
            f"{where} names axes that its mesh lacks: {absent}; the mesh is "
            f"{_show(mesh)}"
        )
    if twice := sorted({axis for axis in named if named.count(axis) > 1}):
        raise ValueError(f"{where} names {twice} twice: an axis can shard a leaf once")
    if len(spec) > len(shape):
        raise ValueError(f"{where} has too many entries")


def _same(mesh: Any, other: Any) -> bool:
    # Two meshes of the same devices in the same order are one, whatever their axes are
    # (automatic, explicit): `jax.set_mesh` and `NamedSharding` often have their own.
    devices = [x.devices.tolist() for x in (mesh, other) if isinstance(x, Mesh)]
    is_one = len(devices) < 2 or devices[0] == devices[1]
    return is_one and mesh.shape_tuple == other.shape_tuple


def _cuts(spec: PartitionSpec, hidden: Collection[str] = ()) -> list[tuple]:
    """Returns which axes of a mesh cut which axes of an array, without hidden ones."""
    named = [(i, name) for i, entry in enumerate(spec) for name in mesh_axes(entry)]
    return [each for each in named if each[1] not in hidden]


def _show(mesh: Any, spec: PartitionSpec | None = None) -> str:
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape_tuple)
    shown = f"mesh({axes})"
    return shown if spec is None else f"{spec} on {shown}"

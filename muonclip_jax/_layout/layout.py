"""Where the leaves of a tree are, read once a trace.

Outside of `jax.shard_map` and `jax.pmap` every leaf is whole, and on a mesh it may be
sharded (`Layout.on_mesh`). Inside, a mapped axis may cut a leaf into blocks, of which
one is here (`PlacedLeaf.cut`, as `shardings=` says). It may divide the batch, so that
gradients and statistics differ along it, but leaves do not (`Layout.replicas`, those of
`axis_name=`). Along any other axis all is the same.
"""

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._matrices.stacks import MatrixLeaf
from .._mesh_axes import (
    gather_everywhere,
    impose_no_sharding,
    is_batched_by_mesh,
    is_checked,
    manual_axes,
)
from .._parameters import paths
from .._parameters.paths import is_masked, PathedTree, show
from .shardings import (
    along,
    blocks_along,
    check_one_mesh,
    check_spec,
    given_shardings,
    locate,
    mesh_axes,
    PlacedLeaf,
    Shardings,
)


#: Names of mapped axes.
AxisNames = tuple[Hashable, ...]


class Place(NamedTuple):
    """Where some leaves are, which decides how they are orthogonalized.

    - "one device": every matrix is at hand.
    - "mesh": sharded on a `mesh` as their specs say.
    - "manual": blocks, which the mapped `axes` cut as their specs say.
    - "unknown": sharded on a `mesh`, as the compiler alone knows.

    Along the `slow` axes devices that hold copies do not share the work on them.
    """

    kind: Literal["one device", "mesh", "manual", "unknown"]
    mesh: Any = None
    axes: AxisNames = ()
    slow: AxisNames = ()


class Layout(NamedTuple):
    """The leaves of a tree, and how mapped axes and meshes divide each of them."""

    tree: PathedTree
    leaves: tuple[PlacedLeaf, ...]
    replicas: AxisNames  # those of `axis_name=`

    @property
    def whole(self) -> PathedTree:
        """The tree with the shapes of the whole leaves."""
        return self.tree._replace(leaves=tuple(leaf.whole for leaf in self.leaves))

    @property
    def mesh(self) -> Any:
        """The mesh of the leaves, `None` if they are on none."""
        return self.on_mesh(self.leaves)[0]

    @property
    def shared_axes(self) -> AxisNames:
        """The axes along which devices share the work on all leaves.

        An axis of `vmap` alongside those of a mesh has no devices of its own.
        """
        cut = (axis for leaf in self.leaves for axis in cut_axes(leaf.cut))
        axes, mapped = dict.fromkeys((*self.replicas, *cut)), _mapped_axes()
        return tuple(a for a in axes if a in mapped) or tuple(axes)

    def of(self, tree: Any) -> list[PlacedLeaf]:
        """Returns the leaves with the arrays of another tree of this structure."""
        pairs = zip(self.leaves, self.tree.of(tree), strict=True)
        return [leaf._replace(array=x) for leaf, x in pairs]

    def on_mesh(self, leaves: Sequence[PlacedLeaf]) -> tuple[Any, Sequence[PlacedLeaf]]:
        """Returns the mesh of leaves, `None` without one, and the leaves with specs.

        The user's shardings come first, then those of arrays and, with explicit axes,
        of tracers. With automatic axes a tracer knows its mesh but not its spec.

        **Raises:** `ValueError`, naming the paths, for shardings that contradict each
        other or do not fit the leaves.
        """
        ambient = jax.sharding.get_abstract_mesh()
        # Inside `jax.shard_map` leaves are one device's. Where the mesh divides what
        # `jax.vmap` maps over, devices that shared the work would mix it.
        if AxisType.Manual in ambient.axis_types or is_batched_by_mesh():
            return None, leaves
        ambient = None if ambient.empty else ambient
        located = [locate(leaf, ambient) for leaf in leaves]
        placed = [leaf for leaf in located if leaf.mesh is not None]
        if not placed:
            return None, leaves
        check_one_mesh(placed)
        # A mesh that names its devices comes first.
        meshes = [leaf.mesh for leaf in placed]
        mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), meshes[0])
        return (None, leaves) if AxisType.Manual in mesh.axis_types else (mesh, located)

    def places(
        self, leaves: Sequence[PlacedLeaf], slow: AxisNames = ()
    ) -> list[tuple[Place, dict[int, MatrixLeaf]]]:
        """Groups leaves that have a view by their place; each by its index.

        **Raises:** `ValueError` for `slow` axes that do not exist here.
        """
        if not any(leaf.view for leaf in leaves):
            return []
        # Inside `shard_map` or `pmap` only the mapped axes say what other devices hold,
        # whatever mesh is set around.
        axes = self.shared_axes
        mesh, leaves = (None, leaves) if axes else self.on_mesh(leaves)
        axes_here = {*axes, *_mapped_axes(), *(() if mesh is None else mesh.axis_names)}
        if axes_here and (absent := [axis for axis in slow if axis not in axes_here]):
            raise ValueError(
                f"slow_axes names axes that are none here: {absent}; there are "
                f"{sorted(map(str, axes_here))}"
            )
        groups: dict[Place, dict[int, MatrixLeaf]] = {}
        for i, leaf in enumerate(leaves):
            spec, place = leaf.spec, Place("one device")
            if axes:
                spec, place = leaf.cut, Place("manual", axes=axes, slow=slow)
            # The program without a mesh is shorter.
            elif mesh is not None and mesh.size > 1:
                kind = "unknown" if spec is None else "mesh"
                place = Place(kind, mesh, slow=slow)
            if leaf.view:
                matrices = MatrixLeaf(leaf.array, leaf.view, spec or PartitionSpec())
                groups.setdefault(place, {})[i] = matrices
        # A mesh may have two places, of leaves whose sharding is known and of others. A
        # plan exchanges the known ones and sends fewer bytes than XLA does; one leaf of
        # unknown sharding must not take that from the rest.
        return sorted(groups.items(), key=lambda group: group[0].kind)

    def averaged(self, gradients: Any, attention_stats: Any = None) -> Any:
        """Averages gradients over the replicas, but not over axes that cut the leaf.

        It keeps their sharding from moving the state. A gradient whose type says that
        it is the same along an axis is left as it is: it was averaged, or summed by
        `jax.grad` of a loss of a device's rows.

        **Raises:** `ValueError` as `check_replicas` does, and for gradients that are no
        floats.
        """
        check_gradients(self.leaves)
        if self.replicas:
            check_replicas(self.replicas, attention_stats)
        # XLA shards a sum as one of its terms: a gradient with another sharding would
        # move the momentum in the first step.
        gradients = jax.tree.map(impose_no_sharding, gradients)
        if not self.replicas:
            return gradients

        def mean(leaf: PlacedLeaf) -> Any:
            # With FSDP an axis divides the batch and cuts the leaves: along it the user
            # has reduced and scattered gradients, and other devices have other entries.
            x, cut = leaf.array, cut_axes(leaf.cut)
            along = tuple(a for a in self.replicas if a not in cut)
            over = () if is_masked(x) else differing(x, along)
            return jax.lax.pmean(x, over) if over else x

        return self.tree.unflatten(map(mean, self.of(gradients)))

    def check_types(self, leaves: Sequence[PlacedLeaf]) -> None:
        """Raises where the types of averaged leaves contradict `shardings=`."""
        # With `check_vma` the type of an array says along which axes it may differ.
        # Devices share work along `shared` as if leaves were the same, or cut as
        # `shardings` says. If that is wrong, each silently returns another update.
        shared = self.shared_axes
        if not shared or not is_checked(shared):
            return
        for leaf in leaves:
            if not isinstance(leaf.array, jax.Array):
                continue
            varying, cutting = manual_axes(leaf.array), cut_axes(leaf.cut)
            if differs := varying.intersection(shared).difference(cutting):
                raise ValueError(
                    f"'{show(leaf.path)}' differs along {sorted(map(str, differs))}: "
                    "say in shardings how these axes cut it, or name them in "
                    "axis_name, to average gradients over them"
                )
            if whole := set(cutting).difference(varying):
                raise ValueError(
                    f"shardings says that {sorted(whole)} cut '{show(leaf.path)}', but "
                    "it is the same on all devices along them: give jax.shard_map the "
                    "same in_specs as shardings, or leave the axes out of shardings"
                )


def read_layout(
    params: Any, shardings: Shardings | None = None, axis_name: Hashable | None = None
) -> Layout:
    """Reads a tree of params, or one with their structure.

    **Raises:** `ValueError`, naming the path, for shardings that are none, that do not
    fit, or whose axes the mesh lacks; for an `axis_name` that is no axis here.
    """
    tree, mesh = paths.flatten(params), jax.sharding.get_abstract_mesh()
    given = given_shardings(shardings, tree, of_blocks=bool(mesh.manual_axes))
    leaves = []
    for path, x, entry in tree.rows(given):
        whole, cut = x, PartitionSpec()
        if mesh.manual_axes and entry is not None and not is_masked(x):
            spec = entry.spec if isinstance(entry, NamedSharding) else entry
            check_spec(path, x.shape, spec, mesh)
            # A spec may name automatic axes, too, along which the array here is whole.
            cut = along(mesh.manual_axes, spec)
            shape = tuple(map(math.prod, blocks_along(x.shape, cut, mesh.shape)))
            whole = jax.ShapeDtypeStruct(shape, x.dtype) if cut_axes(cut) else x
        leaves.append(PlacedLeaf(path, x, whole, entry, cut))
    return Layout(tree, tuple(leaves), axis_names(axis_name))


def axis_names(axis_name: Any, argument: str = "axis_name") -> AxisNames:
    """Returns names as a tuple: one, several or none.

    **Raises:** `ValueError` for what is no name of an axis.
    """
    if axis_name is None:
        return ()
    names = tuple(axis_name) if isinstance(axis_name, list | tuple) else (axis_name,)
    # JAX takes an integer for an axis of the array.
    if any(isinstance(x, int) or not isinstance(x, Hashable) for x in names):
        raise ValueError(
            f"{argument} must be a name or a tuple of names: {axis_name!r}"
        )
    return names


class OverReplicas(optax.GradientTransformationExtraArgs):
    """A transformation that says over which axes it averages."""

    # No field, since a named tuple is unpacked by its users: `init, update = tx`.
    axis_name: Hashable | None = None


def over_replicas(init: Any, update: Any, axis_name: Hashable | None) -> OverReplicas:
    tx = OverReplicas(init, update)
    tx.axis_name = axis_name
    return tx


def check_replicas(replicas: AxisNames, attention_stats: Any = None) -> None:
    """Raises for an `axis_name` that is no axis here, or that `multi_steps` lacks."""
    for axis in replicas:
        try:
            jax.lax.axis_size(axis)
        except NameError as error:
            raise ValueError(
                f"axis_name={axis!r} is no axis here: call the update inside "
                "jax.pmap or jax.shard_map over it, or leave axis_name out"
            ) from error
    manual = tuple(sorted(_mapped_axes()))
    # An axis of `vmap` has a name and a size, but no devices: collectives over it are
    # sums over a batch axis.
    vmapped = [axis for axis in replicas if axis not in manual]
    if vmapped and manual and is_checked(manual):
        raise ValueError(
            f"axis_name={vmapped} are axes of jax.vmap, over which JAX cannot reduce "
            "inside a jax.shard_map that checks types: give it check_vma=False"
        )
    # `multi_steps` accumulates gradients before the transformation inside it sees them.
    # If only the transformation averages, it is too late: each replica has accumulated
    # its own gradients, and skipped steps by itself.
    reduced = getattr(attention_stats, "reduced_over", replicas)
    if missing := [axis for axis in replicas if axis not in reduced]:
        raise ValueError(
            f"the optimizer inside multi_steps has axis_name={missing}: gradients have "
            "to be averaged over it before they are accumulated. Give multi_steps the "
            "same: mc.multi_steps(tx, every_k, axis_name=...)"
        )


def check_gradients(leaves: Sequence[PlacedLeaf]) -> None:
    """Raises, naming the path, for a gradient of integers, bools or `float0`."""
    for leaf in leaves:
        path, x = leaf.path, leaf.array
        dtype = getattr(x, "dtype", type(x))
        if not (is_masked(x) or jax.numpy.issubdtype(dtype, np.inexact)):
            name = "float0" if dtype == jax.dtypes.float0 else np.dtype(dtype).name
            raise ValueError(
                f"the gradient of '{show(path)}' must be a float, got {name}. Integers "
                "have no gradient: keep them out of the params, or cast what should be "
                "trained to a float before jax.grad"
            )


def differing(x: jax.Array, along: AxisNames) -> AxisNames:
    """Returns the axes of `along` along which an array may differ, by its type."""
    varying = manual_axes(x)
    return tuple(axis for axis in along if axis in varying or not is_checked((axis,)))


def cut_axes(
    cut: PartitionSpec, along: Collection[int] | None = None
) -> tuple[str, ...]:
    """Returns the axes of the mesh that cut a leaf, or some of its axes."""
    entries = [x for i, x in enumerate(cut) if along is None or i in along]
    return tuple(name for entry in entries for name in mesh_axes(entry))


def gather(x: jax.Array, cut: PartitionSpec) -> jax.Array:
    """Returns the whole leaf, or row of heads, on every device, from its blocks."""
    for axis, entry in enumerate(cut):
        if names := mesh_axes(entry):
            x = gather_everywhere(x, names, axis=axis, tiled=True)
    return x


def own_block(x: jax.Array, cut: PartitionSpec) -> jax.Array:
    """Returns this device's block of a whole leaf, or of one that broadcasts to it."""
    for axis, entry in enumerate(cut):
        names = mesh_axes(entry)
        # An array that broadcasts along an axis is whole already.
        if names and x.shape[axis] > 1:
            # The first of several axes in one entry is the major one, in `axis_index`
            # of a tuple as in a `PartitionSpec`.
            size = x.shape[axis] // jax.lax.axis_size(names)
            start = jax.lax.axis_index(names) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


def on_whole_blocks(
    function: Callable[[list[MatrixLeaf]], list[jax.Array]],
    blocks: Sequence[MatrixLeaf],
    kept: Callable[[MatrixLeaf], PartitionSpec] = lambda _: PartitionSpec(),
) -> list[jax.Array]:
    """Calls `function` on leaves that only `kept` still cuts, and cuts the results."""
    whole, cuts = [], []
    for x in blocks:
        spec = kept(x)
        cuts.append(along({*cut_axes(x.spec)} - {*cut_axes(spec)}, x.spec))
        whole.append(MatrixLeaf(gather(x.array, cuts[-1]), x.view, spec))
    results = function(whole)
    return [own_block(*pair) for pair in zip(results, cuts, strict=True)]


def _mapped_axes() -> frozenset[str]:
    """Returns the axes that a `jax.shard_map` or `jax.pmap` around this maps."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)

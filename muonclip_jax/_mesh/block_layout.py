"""Blocks of matrices that a mesh cuts, and how they fit together again."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from .._layout.shardings import mesh_axes
from .._matrices.stacks import MatrixView


class AxisRoles(NamedTuple):
    """The role of each axis of a mesh for the matrices of a leaf."""

    batch: tuple[str, ...]  # along these, devices hold different matrices
    replicated: tuple[str, ...]  # devices hold the same
    sharded: tuple[str, ...]  # devices hold different blocks of the same


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """The blocks of one matrix, as devices along `roles.sharded` hold them."""

    roles: AxisRoles
    devices: int
    block_shape: tuple[int, int]  # a block as a part of the matrix, (fan_in, fan_out)
    whole: MatrixView  # the matrix in an array (*sizes of roles.sharded, *block)

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix, once it is joined."""
        return self.whole.matrix_shape

    @property
    def wide(self) -> "BlockLayout":
        """The same, with tall matrices turned when they are joined."""
        return dataclasses.replace(self, whole=self.whole.wide)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Blocks `(matrices, devices, ...)` to matrices."""
        return jax.vmap(
            lambda x: self.whole.to_matrices(x.reshape(self.whole.shape))[0]
        )(blocks)

    def split(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `join`."""
        return jax.vmap(
            lambda x: self.whole.from_matrices(x[None]).reshape(
                self.devices, *self.block_shape
            )
        )(matrices)


def axis_roles(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]
) -> AxisRoles:
    """`mesh` maps names of axes to sizes."""
    by_axis = _axes_of(view, spec, mesh)
    batch = {name for axis in view.batch for name in by_axis[axis]}
    # An axis that cuts a stack gives each device whole matrices, or blocks of them, of
    # its own: nothing is exchanged along it.
    sharded = {name for axes in by_axis for name in axes} - batch
    names = [name for name, size in mesh.items() if size > 1]
    return AxisRoles(
        batch=tuple(name for name in names if name in batch),
        replicated=tuple(name for name in names if name not in batch | sharded),
        sharded=tuple(name for name in names if name in sharded),
    )


def block_layout(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]
) -> BlockLayout:
    roles, local = axis_roles(view, spec, mesh), local_view(view, spec, mesh)
    by_axis, inner = _axes_of(view, spec, mesh), view.reduction + view.output
    sizes = tuple(mesh[name] for name in roles.sharded)

    # Blocks arrive as an array of an axis for each mesh axis and then the axes of a
    # block. An axis of the matrix is the mesh axes that cut it, the major one first,
    # and then its own of the block: next to each other they are it again.
    def after_its_devices(axis: int) -> list[int]:
        cuts = [roles.sharded.index(name) for name in by_axis[axis]]
        return [*cuts, len(sizes) + inner.index(axis)]

    reduction, output = (
        tuple(i for axis in axes for i in after_its_devices(axis))
        for axes in (view.reduction, view.output)
    )
    block = tuple(local.shape[axis] for axis in inner)
    return BlockLayout(
        roles,
        math.prod(sizes),
        (local.fan_in, local.fan_out),
        MatrixView((), reduction, output, sizes + block),
    )


def local_view(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]
) -> MatrixView:
    """The view of what one device holds of the leaf."""
    shape = tuple(
        size // math.prod(mesh[name] for name in names)
        for size, names in zip(view.shape, _axes_of(view, spec, mesh), strict=True)
    )
    return dataclasses.replace(view, shape=shape)


def _axes_of(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """For every axis of the leaf the mesh axes that cut it, without those of size 1."""
    entries = [*spec, *[None] * (len(view.shape) - len(spec))]
    return [
        tuple(name for name in mesh_axes(entry) if mesh[name] > 1) for entry in entries
    ]

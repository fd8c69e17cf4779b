"""How a mesh cuts the matrices of a leaf, and how their blocks fit together again."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from .._matrices.view import MatrixView
from .placement import mesh_axes


class AxisRoles(NamedTuple):
    """What each axis of a mesh does to the matrices of a leaf; in the mesh's order."""

    batch: tuple[str, ...]  # along these, devices hold different matrices
    replicated: tuple[str, ...]  # devices hold the same
    sharded: tuple[str, ...]  # devices hold different blocks of the same


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """How the blocks of one matrix, as devices along `roles.sharded` hold them, fit.

    A block has the axes of the leaf that make up the matrix, the inputs first.
    """

    roles: AxisRoles
    devices: tuple[int, ...]  # sizes of the axes of `roles.sharded`
    block: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]  # that cut each axis of the block, major first
    num_inputs: int

    def join(self, blocks: jax.Array) -> jax.Array:
        """Blocks `(devices, fan_in, fan_out)` to a matrix, the short side first."""
        x = blocks.reshape(*self.devices, *self.block)
        x = x.transpose(self._order).reshape(self._whole)
        return x.mT if self._is_tall else x

    def split(self, matrix: jax.Array) -> jax.Array:
        """The inverse of `join`."""
        x = matrix.mT if self._is_tall else matrix
        sizes = (*self.devices, *self.block)
        x = x.reshape([sizes[i] for i in self._order])
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return x.transpose(inverse).reshape(math.prod(self.devices), *self.block_shape)

    @property
    def block_shape(self) -> tuple[int, int]:
        """A block as a part of the matrix, `(fan_in, fan_out)`."""
        return self._fans(self.block)

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix with the short side first."""
        short, long = sorted(self._whole)
        return short, long

    @property
    def _order(self) -> tuple[int, ...]:
        """Every axis of a block behind the mesh axes that cut it."""
        place = {name: i for i, name in enumerate(self.roles.sharded)}
        order: list[int] = []
        for i, axes in enumerate(self.axes):
            order += [*(place[axis] for axis in axes), len(self.devices) + i]
        return tuple(order)

    @property
    def _whole(self) -> tuple[int, int]:
        size = dict(zip(self.roles.sharded, self.devices, strict=True))
        return self._fans(
            [
                entries * math.prod(size[axis] for axis in axes)
                for entries, axes in zip(self.block, self.axes, strict=True)
            ]
        )

    def _fans(self, sizes: Sequence[int]) -> tuple[int, int]:
        inputs, outputs = sizes[: self.num_inputs], sizes[self.num_inputs :]
        return math.prod(inputs), math.prod(outputs)

    @property
    def _is_tall(self) -> bool:
        return self._whole[0] > self._whole[1]


def axis_roles(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]
) -> AxisRoles:
    """`mesh` maps names of axes to sizes."""
    by_axis = _axes_of(view, spec, mesh)
    batch = {name for axis in view.batch for name in by_axis[axis]}
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
    roles = axis_roles(view, spec, mesh)
    by_axis, local = _axes_of(view, spec, mesh), local_view(view, spec, mesh)
    inner = view.reduction + view.output
    return BlockLayout(
        roles=roles,
        devices=tuple(mesh[name] for name in roles.sharded),
        block=tuple(local.shape[axis] for axis in inner),
        axes=tuple(by_axis[axis] for axis in inner),
        num_inputs=len(view.reduction),
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

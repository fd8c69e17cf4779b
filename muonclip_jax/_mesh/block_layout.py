"""How a mesh cuts the matrices of a leaf, and how their blocks fit together again."""

import dataclasses
import math
from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from .._matrices.view import MatrixView
from .placement import mesh_axes


@dataclasses.dataclass(frozen=True)
class Route:
    """What each axis of a mesh does to the matrices of a leaf; in the mesh's order."""

    batch: tuple[str, ...]  # other devices hold other matrices
    copies: tuple[str, ...]  # other devices hold the same
    cut: tuple[str, ...]  # other devices hold other blocks of the same


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the blocks of one matrix, as devices along `route.cut` hold them, fit.

    A block has the axes of the leaf that make up the matrix, the inputs first.
    """

    cut: tuple[tuple[str, int], ...]  # the axes of `route.cut` and their sizes
    block: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]  # that cut each axis of the block, major first
    num_inputs: int

    def join(self, blocks: jax.Array) -> jax.Array:
        """Blocks `(devices, fan_in, fan_out)` to a matrix, the short side first."""
        x = blocks.reshape(*(size for _, size in self.cut), *self.block)
        x = x.transpose(self._order).reshape(self._whole)
        return x.mT if self._is_tall else x

    def split(self, matrix: jax.Array) -> jax.Array:
        """The inverse of `join`."""
        x = matrix.mT if self._is_tall else matrix
        x = x.reshape([self._sizes[i] for i in self._order])
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        devices = math.prod(size for _, size in self.cut)
        return x.transpose(inverse).reshape(devices, *self.block_shape)

    @property
    def block_shape(self) -> tuple[int, int]:
        """A block as a part of the matrix, `(fan_in, fan_out)`."""
        inputs, outputs = self.block[: self.num_inputs], self.block[self.num_inputs :]
        return math.prod(inputs), math.prod(outputs)

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix with the short side first."""
        short, long = sorted(self._whole)
        return short, long

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (*(size for _, size in self.cut), *self.block)

    @property
    def _order(self) -> tuple[int, ...]:
        """Every axis of a block behind the mesh axes that cut it."""
        place = {name: i for i, (name, _) in enumerate(self.cut)}
        order: list[int] = []
        for i, axes in enumerate(self.axes):
            order += [*(place[axis] for axis in axes), len(self.cut) + i]
        return tuple(order)

    @property
    def _whole(self) -> tuple[int, int]:
        sizes = dict(self.cut)
        whole = [
            size * math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(self.block, self.axes, strict=True)
        ]
        return math.prod(whole[: self.num_inputs]), math.prod(whole[self.num_inputs :])

    @property
    def _is_tall(self) -> bool:
        return self._whole[0] > self._whole[1]


def route(view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]) -> Route:
    """`mesh` maps names of axes to sizes."""
    by_axis = _axes_of(view, spec, mesh)
    batch = {name for axis in view.batch for name in by_axis[axis]}
    cut = {name for axes in by_axis for name in axes} - batch
    names = [name for name, size in mesh.items() if size > 1]
    return Route(
        batch=tuple(name for name in names if name in batch),
        copies=tuple(name for name in names if name not in batch | cut),
        cut=tuple(name for name in names if name in cut),
    )


def layout(view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]) -> Layout:
    by_axis, local = _axes_of(view, spec, mesh), local_view(view, spec, mesh)
    inner = view.reduction + view.output
    return Layout(
        cut=tuple((name, mesh[name]) for name in route(view, spec, mesh).cut),
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

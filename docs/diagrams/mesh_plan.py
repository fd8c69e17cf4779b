"""What each device of a mesh holds and iterates, as JAX and the package say it."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from internals import (
    groups_of,
    matrix_view,
    MatrixLeaf,
    OwnedStack,
    plan_exchanges,
    solver,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers


SOLVER = solver("tpu")
AXES = MuonDimensionNumbers(-2, -1)
Shape = tuple[int, int, int]  # (matrices, fan_in, fan_out)


class Leaf(NamedTuple):
    name: str
    shape: Shape
    spec: PartitionSpec


class Matrix(NamedTuple):
    leaf: str
    number: int


class Block(NamedTuple):
    """The part of a matrix that a device holds, in shares of its two sides."""

    matrix: Matrix
    rows: tuple[float, float]
    columns: tuple[float, float]


class Plan:
    def __init__(self, mesh: Mapping[str, int], leaves: list[Leaf]):
        self.mesh, self.leaves = mesh, leaves
        self._mesh = jax.make_mesh(
            tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh)
        )
        given = (
            (jax.ShapeDtypeStruct(leaf.shape, "float32"), leaf.spec) for leaf in leaves
        )
        matrices = [
            MatrixLeaf(x, matrix_view(x.shape, AXES), spec) for x, spec in given
        ]
        self.exchanges = plan_exchanges(SOLVER, matrices, mesh)
        # In the order in which a device iterates them.
        self.stacks = [owned for each in self.exchanges for owned in each.stacks]

    def coordinates(self, device: int) -> dict[str, int]:
        sizes = tuple(self.mesh.values())
        places = np.unravel_index(device, sizes)
        return {name: int(i) for name, i in zip(self.mesh, places, strict=True)}

    def held(self, device: int) -> list[Block]:
        return [block for leaf in self.leaves for block in self._held(leaf, device)]

    def owned(self, device: int) -> list[Matrix]:
        """What a device iterates, whole, in the order in which it does."""
        return [matrix for each in self.stacks for matrix in self._owned(each, device)]

    def costs(self, device: int) -> list[tuple[int, float]]:
        """Stack and cost of each matrix that a device iterates."""
        return [
            (i, SOLVER.cost(each.stack.shape, each.stack.dtype))
            for i, each in enumerate(self.stacks)
            for _ in self._owned(each, device)
        ]

    def _slices(self, leaf: Leaf, device: int) -> list[tuple[int, int]]:
        where = NamedSharding(self._mesh, leaf.spec).devices_indices_map(leaf.shape)
        cut = where[self._mesh.devices.flat[device]]
        ranges = [x.indices(size) for x, size in zip(cut, leaf.shape, strict=True)]
        return [(start, stop) for start, stop, _ in ranges]

    def _held(self, leaf: Leaf, device: int) -> list[Block]:
        numbers, *sides = self._slices(leaf, device)
        rows, columns = (
            (start / size, stop / size)
            for (start, stop), size in zip(sides, leaf.shape[1:], strict=True)
        )
        return [Block(Matrix(leaf.name, i), rows, columns) for i in range(*numbers)]

    def _owned(self, owned: OwnedStack, device: int) -> list[Matrix]:
        groups, counts = groups_of(owned.cut, self.mesh), owned.counts
        ((_, member),) = np.argwhere(groups == device)
        here = list(
            itertools.chain.from_iterable(
                self._held(self.leaves[i], device) for i, _ in owned.stack.parts
            )
        )
        first, count = int(counts[:member].sum()), int(counts[member])
        return [block.matrix for block in here[first : first + count]]

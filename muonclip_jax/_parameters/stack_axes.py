"""Where the layers of a stack lie in a leaf, and what is left of it without them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


Shape = tuple[int, ...]

#: The axis of the layers in the leaves of a module that is stacked, by its path.
StackAxes = Mapping[str, int]
IN_FRONT: StackAxes = MappingProxyType({})


class Stack(NamedTuple):
    """The axes of a stack in a leaf: `depth` of them, from `start` on."""

    start: int
    depth: int

    def sizes(self, shape: Shape) -> Shape:
        return shape[self.start : self.start + self.depth]

    def layer(self, shape: Shape) -> Shape:
        """The shape of the leaf in one layer."""
        return shape[: self.start] + shape[self.start + self.depth :]

    def others(self, rank: int) -> tuple[int, ...]:
        """The axes of one layer in a leaf of this rank, from the end."""
        return tuple(axis - rank for axis in self.layer(tuple(range(rank))))

    def axis(self, axis: int, rank: int) -> int:
        """Where an axis of one layer is in the leaf of this rank; both from the end."""
        index = axis + rank - self.depth
        return axis if index >= self.start else axis - self.depth


def stack_at(axis: int, rank: int, depth: int) -> Stack | None:
    """A stack that begins at an axis or, from the end, ends there, if it can."""
    start = axis if axis >= 0 else axis + rank + 1 - depth
    return Stack(start, depth) if 0 <= start <= rank - depth else None


def without_ones(bias: Shape) -> Shape:
    """A bias as Flax has it; Equinox keeps that of a convolution as `(out, 1, 1)`."""
    while len(bias) > 1 and bias[-1] == 1:
        bias = bias[:-1]
    return bias

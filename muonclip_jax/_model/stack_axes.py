"""Where the layers of a stack lie in a leaf, and what is left of it without them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .paths import is_masked, LeafAt, Path, show, show_all, split


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

    def axis(self, axis: int, rank: int) -> int:
        """Where an axis of one layer is in the leaf of this rank; both from the end."""
        index = axis + rank - self.depth
        return axis if index >= self.start else axis - self.depth


def stack_at(axis: int, rank: int, depth: int) -> Stack | None:
    """A stack that begins at an axis or, from the end, ends there, if it can."""
    start = axis if axis >= 0 else axis + rank + 1 - depth
    return Stack(start, depth) if 0 <= start <= rank - depth else None


class ModuleStacks:
    """`stack_axes`, checked against the leaves.

    **Raises:** `ValueError` for modules that the params lack, and for leaves that lack
    the axis.
    """

    def __init__(self, stack_axes: StackAxes, leaf_at: LeafAt):
        self._axes = {split(module): axis for module, axis in stack_axes.items()}
        self._shapes = {
            path: () if is_masked(leaf) else tuple(leaf.shape)
            for path, leaf in leaf_at.items()
        }
        self._layers = self._shapes
        if self._axes and leaf_at:
            self._check_present(leaf_at)
            self._check_in_range()
            self._layers = {p: self.of(p).layer(s) for p, s in self._shapes.items()}

    def axis_of(self, path: Path) -> int | None:
        """That of the innermost module named that holds a path."""
        if not self._axes:
            return None
        starts = (path[:n] for n in range(len(path), -1, -1))
        return next((self._axes[s] for s in starts if s in self._axes), None)

    def of(self, path: Path) -> Stack:
        """The stack in the leaf at a path."""
        axis, rank = self.axis_of(path), len(self.shape(path))
        if axis is None or not rank:
            return Stack(0, 0)
        # A number for each layer has one axis, wherever the others have that one.
        return stack_at(axis if rank > 1 else 0, rank, 1) or Stack(0, 0)

    def shape(self, path: Path) -> Shape:
        """The shape of the leaf at a path, `()` if there is none in sight."""
        return self._shapes.get(path, ())

    def layer(self, path: Path) -> Shape:
        """The shape of the leaf at a path in one layer, `()` if there is none."""
        return self._layers.get(path, ())

    def _check_present(self, leaf_at: LeafAt) -> None:
        starts = {path[:n] for path in leaf_at for n in range(len(path) + 1)}
        absent = [
            module
            for module in self._axes
            if module not in starts and not leaf_at.hides(module)
        ]
        if absent:
            raise ValueError(
                f"stack_axes names {show_all(absent)}, which the params lack"
            )

    def _check_in_range(self) -> None:
        strays = [
            f"'{show(path)}' {shape} lacks axis {axis}"
            for path, shape in self._shapes.items()
            if len(shape) > 1
            and (axis := self.axis_of(path)) is not None
            and stack_at(axis, len(shape), 1) is None
        ]
        if strays:
            modules = show_all(self._axes)
            raise ValueError(f"stack_axes of {modules}: {', '.join(strays)}")

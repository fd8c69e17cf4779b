"""Which leaves carry a stack of layers, and where."""

from collections.abc import Mapping
from typing import Any

from .paths import is_masked, LeafAt, Path, show, show_all, split
from .stack_axes import Shape, Stack, stack_at, StackAxes
from .stacked_modules import find_stacks, Found


_NO_STACK = Stack(0, 0)


class ModuleStacks:
    """Where the stack of each leaf lies: as `stack_axes` says, or as the leaves show.

    **Raises:** `ValueError` for modules that the params lack, and for leaves that lack
    the axis.
    """

    def __init__(self, stack_axes: StackAxes, leaf_at: LeafAt):
        self._axes = {split(module): axis for module, axis in stack_axes.items()}
        self._shapes = {
            path: () if is_masked(leaf) else tuple(leaf.shape)
            for path, leaf in leaf_at.items()
        }
        if self._axes and leaf_at:
            self._check_present(leaf_at)
            self._check_in_range()
        self._found = find_stacks(
            {
                path: self._shapes[path]
                for path, leaf in leaf_at.items()
                if not is_masked(leaf) and self._told(path) is None
            }
        )
        self._stacks = {path: self._stack(path) for path in self._shapes}
        self._layers = {p: x.layer(self._shapes[p]) for p, x in self._stacks.items()}

    def axis_of(self, path: Path) -> int:
        """Where the stack begins or, from the end, stops; in front if none is known."""
        told, found = self._told(path), self._found_around(path)
        return told if told is not None else found.axis if found else 0

    def of(self, path: Path) -> Stack:
        """The stack in the leaf at a path."""
        return self._stacks.get(path, _NO_STACK)

    def _stack(self, path: Path) -> Stack:
        told, rank = self._told(path), len(self.shape(path))
        if told is not None:
            # A number for each layer has one axis, wherever the others have that one.
            stack = stack_at(told if rank > 1 else 0, rank, min(1, rank))
            return stack or _NO_STACK
        found = self._found_around(path)
        return found.of(rank) if found else _NO_STACK

    def _told(self, path: Path) -> int | None:
        """What is said of the innermost module named that holds a path."""
        return _innermost(self._axes, path)

    def _found_around(self, path: Path) -> Found | None:
        return _innermost(self._found, path)

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
            and (axis := self._told(path)) is not None
            and stack_at(axis, len(shape), 1) is None
        ]
        if strays:
            modules = show_all(self._axes)
            raise ValueError(f"stack_axes of {modules}: {', '.join(strays)}")


def _innermost(entries: Mapping[Path, Any], path: Path) -> Any:
    """The entry of the innermost module that holds a path, `None` if there is none."""
    if not entries:
        return None
    starts = (path[:n] for n in range(len(path), -1, -1))
    return next((entries[start] for start in starts if start in entries), None)

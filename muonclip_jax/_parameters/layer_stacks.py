"""Stacks of layers, as the user gives them: an axis of a module, or its name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from . import names
from .paths import is_masked, LeafAt, Path, Shape, show, show_all, split


#: The axis of the layers in the leaves of a module that is stacked, by its path.
StackAxes = Mapping[str, int]
IN_FRONT: StackAxes = MappingProxyType({})


class LayerStack(NamedTuple):
    """The axes of a stack in a leaf: `depth` of them, from `start` on."""

    start: int
    depth: int
    is_sure: bool = True  # else what a mask hides may show another one

    def sizes(self, shape: Shape) -> Shape:
        return shape[self.start : self.start + self.depth]

    def layer(self, shape: Shape) -> Shape:
        """The shape of the leaf in one layer."""
        return shape[: self.start] + shape[self.start + self.depth :]


def stack_at(axis: int, rank: int, depth: int) -> LayerStack | None:
    """Returns the stack that begins at an axis, or ends there if that is negative."""
    start = axis if axis >= 0 else axis + rank + 1 - depth
    return LayerStack(start, depth) if 0 <= start <= rank - depth else None


def given_stacks(
    leaf_at: LeafAt, stack_axes: StackAxes, axis_names: Mapping[Path, tuple[str, ...]]
) -> dict[Path, LayerStack]:
    """Returns the stacks that `stack_axes` gives, or that names of axes show.

    **Raises:** `ValueError` for modules that the params lack, and for leaves that lack
    the axis.
    """
    given = {split(module): axis for module, axis in stack_axes.items()}
    starts = {path[:n] for path in leaf_at for n in range(len(path) + 1)}
    absent = [m for m in given if m not in starts and not leaf_at.hides(m)]
    if absent and leaf_at:
        raise ValueError(f"stack_axes names {show_all(absent)}, which the params lack")
    stacks: dict[Path, LayerStack] = {}
    strays = []
    for path, leaf in leaf_at.items():
        if is_masked(leaf):
            continue
        rank = len(leaf.shape)
        around = [given[path[:n]] for n in range(len(path) + 1) if path[:n] in given]
        layer_axes = [
            i
            for i, x in enumerate(axis_names.get(path, ()))
            # The last axis of a router counts experts, and stacks nothing.
            if x in names.LAYER_AXES or (x in names.EXPERT_AXES and i < rank - 1)
        ]
        if around:
            # Scalars of layers are stacked along their only axis, whatever is given.
            axis = around[-1] if rank > 1 else 0
            stack = stack_at(axis, rank, min(1, rank))
            stacks[path] = stack or LayerStack(0, 0)
            shape = tuple(leaf.shape)
            strays += [] if stack else [f"'{show(path)}' {shape} lacks axis {axis}"]
        elif layer_axes and layer_axes[-1] - layer_axes[0] == len(layer_axes) - 1:
            stacks[path] = LayerStack(layer_axes[0], len(layer_axes))
    if strays:
        raise ValueError(f"stack_axes of {show_all(given)}: {', '.join(strays)}")
    return stacks

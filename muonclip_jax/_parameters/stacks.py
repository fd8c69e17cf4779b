"""Layers stacked in one leaf: where, and what is left of the leaf in one layer.

They are where `stack_axes` or the leaf's axis names say. Else vectors give them away:
in one layer a norm has one axis. Where every leaf under a module has the same sizes at
the same place, and its norms have just those axes more, they are a stack: in front, as
Flax, Haiku and Haliax put it, after the first axis, as MaxText does, or at the end.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from . import names
from .flax_leaves import without_ones
from .paths import is_masked, LeafAt, Path, Shape, show, show_all, split


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


def stack_at(axis: int, rank: int, depth: int) -> Stack | None:
    """A stack that begins at an axis or, from the end, ends there, if it can."""
    start = axis if axis >= 0 else axis + rank + 1 - depth
    return Stack(start, depth) if 0 <= start <= rank - depth else None


def find_stacks(
    leaf_at: LeafAt,
    stack_axes: StackAxes,
    axis_names: Mapping[Path, tuple[str, ...]],
) -> dict[Path, Stack]:
    """The stack of each leaf.

    **Raises:** `ValueError` for modules in `stack_axes` that the params lack, and for
    leaves that lack the axis.
    """
    given = {split(module): axis for module, axis in stack_axes.items()}
    starts = {path[:n] for path in leaf_at for n in range(len(path) + 1)}
    absent = [m for m in given if m not in starts and not leaf_at.hides(m)]
    if absent and leaf_at:
        raise ValueError(f"stack_axes names {show_all(absent)}, which the params lack")
    found: dict[Path, Stack] = dict.fromkeys(leaf_at, Stack(0, 0))
    shapes: dict[Path, Shape] = {}
    members: dict[Path, list[Path]] = {}
    strays = []
    for path, leaf in leaf_at.items():
        if is_masked(leaf):
            continue
        shape = tuple(leaf.shape)
        around = [given[path[:n]] for n in range(len(path) + 1) if path[:n] in given]
        named = [
            i
            for i, x in enumerate(axis_names.get(path, ()))
            if x in names.STACKED or (x in names.EXPERTS and i < len(shape) - 1)
        ]
        if around:
            # A number for each layer has one axis, wherever the others have theirs.
            axis = around[-1] if len(shape) > 1 else 0
            stack = stack_at(axis, len(shape), min(1, len(shape)))
            found[path] = stack or Stack(0, 0)
            strays += [] if stack else [f"'{show(path)}' {shape} lacks axis {axis}"]
        elif named and named[-1] - named[0] == len(named) - 1:
            found[path] = Stack(named[0], len(named))
        else:
            shapes[path] = shape
            for depth in range(len(path)):
                members.setdefault(path[:depth], []).append(path)
    if strays:
        raise ValueError(f"stack_axes of {show_all(given)}: {', '.join(strays)}")
    seen: dict[Path, Stack] = {}  # the outermost of nested stacks holds them all
    for module in sorted(members, key=len):
        if members[module][1:] and members[module][0] not in seen:
            seen |= _shared(members[module], shapes)
    return found | seen


def _shared(inside: list[Path], shapes: Mapping[Path, Shape]) -> dict[Path, Stack]:
    """The stack that all leaves under a module share, if they do, by their paths."""
    kinds = {p: names.kind(p) for p in inside}
    kernels = [p for p in inside if p[-1] in names.KERNELS and kinds[p] != "norm"]
    vectors = [shapes[p] for p in inside if kinds[p] == "norm"]
    places: Iterable[int] = (0, 1, -1)
    if not vectors:
        # A bias may have an axis of heads, which a kernel has after its first. Only one
        # that is not just the last axes of its kernel is of a stack.
        biases = {p[:-1]: shapes[p] for p in inside if "b" in (kinds[p][:1], p[-1])}
        own = {p: biases[p[:-1]] for p in kernels if p[:-1] in biases}
        own = {p: without_ones(x) if p[-1] == "weight" else x for p, x in own.items()}
        if any(x != shapes[p][-len(x) :] for p, x in own.items() if x):
            vectors, places = list(own.values()), (0,)
    depth = min(map(len, vectors), default=0) - 1
    if depth < 1 or not (kernels or any(len(shapes[p]) > depth + 1 for p in inside)):
        return {}
    # A gain for each output of the one kernel there, as of each head, is no stack.
    if len(kernels) == 1 and all(x == shapes[kernels[0]][-len(x) :] for x in vectors):
        return {}
    for axis in places:
        found = {p: stack_at(axis, len(shapes[p]), depth) for p in inside}
        if len({x and x.sizes(shapes[p]) for p, x in found.items()}) == 1:
            return {p: x for p, x in found.items() if x}
    return {}

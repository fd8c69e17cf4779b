"""Layers stacked in one leaf: the axes of the stack, and what is left in one layer.

They are where `stack_axes` or the leaf's axis names say. Else vectors give them away: in
one layer a norm has one axis. Where every leaf under a module has the same sizes at the
same place, and its norms have just those axes more, they are a stack: in front, as
Flax, Haiku and Haliax put it, after the first axis, as MaxText does, or at the end.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from . import names
from .paths import is_masked, LeafAt, Path, show, show_all, split


Shape = tuple[int, ...]

#: The axis of the layers in the leaves of a module that is stacked, by its path.
StackAxes = Mapping[str, int]
IN_FRONT: StackAxes = MappingProxyType({})

# Axis names of layers and experts: MaxText, T5X, Haliax, penzai.
_STACKED = {"layers", "layer", "stack", "block", "blocks", "stacked", "num_layers"}
_STACKED |= {"exp", "expert", "experts", "dense_layers", "moe_layers"}


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


def without_ones(bias: Shape) -> Shape:
    """A bias as Flax has it: `(out, 1, 1)` in Equinox, `(1, 1, 1, out)` in stax."""
    return tuple(size for size in bias if size != 1) or bias[:1]


class ModuleStacks:
    """The stack of each leaf: as `stack_axes` says, or as the leaves show.

    **Raises:** `ValueError` for modules that the params lack, and for leaves that lack
    the axis.
    """

    def __init__(
        self,
        stack_axes: StackAxes,
        leaf_at: LeafAt,
        axis_names: Mapping[Path, tuple[str, ...]] = MappingProxyType({}),
    ):
        given = {split(module): axis for module, axis in stack_axes.items()}
        starts = (
            {path[:n] for path in leaf_at for n in range(len(path) + 1)}
            if given
            else set()
        )
        absent = [m for m in given if m not in starts and not leaf_at.hides(m)]
        if absent and leaf_at:
            raise ValueError(
                f"stack_axes names {show_all(absent)}, which the params lack"
            )
        self._shapes = {
            path: () if is_masked(leaf) else tuple(leaf.shape)
            for path, leaf in leaf_at.items()
        }
        self._stacks: dict[Path, Stack] = {}
        self._axes: dict[Path, int] = {}
        strays, open_shapes = [], {}
        for path, shape in self._shapes.items():
            around = [
                given[path[:n]] for n in range(len(path) + 1) if path[:n] in given
            ]
            named = [i for i, x in enumerate(axis_names.get(path, ())) if x in _STACKED]
            if around:
                # A number for each layer has one axis, wherever the others have theirs.
                axis = around[-1] if len(shape) > 1 else 0
                stack = stack_at(axis, len(shape), min(1, len(shape)))
                if stack is None:
                    strays.append(f"'{show(path)}' {shape} lacks axis {axis}")
                self._axes[path], self._stacks[path] = around[-1], stack or Stack(0, 0)
            elif named and named == list(range(named[0], named[0] + len(named))):
                self._axes[path] = named[0]
                self._stacks[path] = Stack(named[0], len(named))
            elif not is_masked(leaf_at[path]):
                open_shapes[path] = shape
        if strays:
            raise ValueError(f"stack_axes of {show_all(given)}: {', '.join(strays)}")
        for path, (axis, depth) in _found(open_shapes).items():
            rank = len(open_shapes[path])
            short = Stack(0, rank) if rank <= depth else Stack(0, 0)
            self._axes[path] = axis
            self._stacks[path] = (rank > depth and stack_at(axis, rank, depth)) or short

    def axis_of(self, path: Path) -> int:
        """Where the stack begins or, from the end, stops; in front if none is known."""
        return self._axes.get(path, 0)

    def of(self, path: Path) -> Stack:
        return self._stacks.get(path, Stack(0, 0))

    def shape(self, path: Path) -> Shape:
        """The shape of the leaf at a path, `()` if there is none in sight."""
        return self._shapes.get(path, ())

    def layer(self, path: Path) -> Shape:
        """The shape of the leaf at a path in one layer, `()` if there is none."""
        return self.of(path).layer(self.shape(path))


def _found(shapes: Mapping[Path, Shape]) -> dict[Path, tuple[int, int]]:
    """Axis and depth of the stack that each leaf is in, the outermost of nested ones."""
    if max(map(len, shapes.values()), default=0) < 2:
        return {}
    members: dict[Path, list[Path]] = {}
    for path in shapes:
        for depth in range(len(path)):
            members.setdefault(path[:depth], []).append(path)
    found: dict[Path, tuple[int, int]] = {}
    for module in sorted(members, key=len):
        inside = members[module]
        if inside[0] not in found and (place := _place(inside, module, shapes)):
            found |= dict.fromkeys(inside, place)
    return found


def _place(
    inside: list[Path], module: Path, shapes: Mapping[Path, Shape]
) -> tuple[int, int] | None:
    """Axis and depth of a stack that all leaves under a module share."""
    kinds = {p: names.kind(p) for p in inside}
    biases = {p[:-1]: shapes[p] for p in inside if "b" in (kinds[p][:1], p[-1])}
    kernels = [p for p in inside if p[-1] in names.KERNELS and kinds[p] != "norm"]
    vectors = [
        shapes[p]
        for p in inside
        if kinds[p] == "norm"
        # A weight with more axes than its bias is a layer, whatever its module's name.
        and not (
            p[-1] in names.KERNELS and 0 < len(biases.get(p[:-1], ())) < len(shapes[p])
        )
    ]
    places: Iterable[int] = (0, 1, -1)
    if not vectors:
        # A bias may have an axis of heads, which a kernel has after its first. Only one
        # that is not just the last axes of its kernel is of a stack.
        own = {p: biases[p[:-1]] for p in kernels if p[:-1] in biases}
        own = {p: _of_weight(p, bias) for p, bias in own.items()}
        if any(bias != shapes[p][-len(bias) :] for p, bias in own.items() if bias):
            vectors, places = list(own.values()), (0,)
    depth = min(map(len, vectors), default=0) - 1
    is_layer = kernels or any(len(shapes[p]) > depth + 1 for p in inside)
    # A gain for each output of the one kernel next to it, as of each head, is no stack.
    is_of_outputs = len(kernels) == 1 and all(
        x == shapes[kernels[0]][-len(x) :] for x in vectors
    )
    if depth < 1 or not is_layer or is_of_outputs:
        return None
    fits, features = [], {}
    for axis in places:
        stacks = [stack_at(axis, len(shapes[p]), depth) for p in inside]
        stacks = [
            s or Stack(0, len(shapes[p])) for s, p in zip(stacks, inside, strict=True)
        ]
        sizes = {s.sizes(shapes[p]) for s, p in zip(stacks, inside, strict=True)}
        if len(sizes) == 1 and len(next(iter(sizes))) == depth:
            fits.append(axis)
            layers = [(stack_at(axis, len(x), depth), x) for x in vectors]
            features[axis] = {n for s, x in layers if s for n in s.layer(x)}
    if len(fits) > 1:
        # Both the layers and the features are shared; features are known outside.
        known = {
            x[-1]
            for p, x in shapes.items()
            if p[: len(module)] != module and x
            if names.kind(p) == "embedding" or (len(x) == 1 and names.kind(p) == "norm")
        }
        fits = [axis for axis in fits if features[axis] <= known] or fits
    return (fits[0], depth) if fits else None


def _of_weight(path: Path, bias: Shape) -> Shape:
    return without_ones(bias) if path[-1] == "weight" else bias

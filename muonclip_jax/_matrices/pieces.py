"""Leaves of several matrices side by side, cut into pieces and put together.

    leaf (..., outputs, ...) -> (..., groups, parts, rest, ...) -> a piece for each
    part, whose groups and heads are axes of a stack

All of it is reshapes and slices of what is at hand, so that a block of a leaf, on one
device of a mesh, is cut as the whole leaf is: where the mesh cuts along groups or heads
nothing is exchanged for them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .stacks import MatrixLeaf, MatrixView


class Piece(NamedTuple):
    """One part of a leaf, as an array of its own.

    - `view`: its matrices.
    - `axes`: those of the view.
    - `units`: the first of its units, and the one after its last.
    """

    view: MatrixView
    axes: "list[_Axis]"
    units: tuple[int, int] = (0, 0)

    @property
    def leaf_axes(self) -> list[int | None]:
        """Returns the axis of the leaf that each axis is, or is the major factor of."""
        return [axis.leaf_axis for axis in self.axes]


#: Puts arrays of pieces together into arrays of leaves.
Unite = Callable[[Iterable[jax.Array]], list[jax.Array]]


def divide(leaves: Sequence[MatrixLeaf]) -> tuple[list[MatrixLeaf], Unite]:
    """Cuts leaves, or blocks of whole pieces; returns the pieces and the way back."""
    # Most models have no leaf to cut, and their program does not change.
    if not any(leaf.view.division for leaf in leaves):
        return [*leaves], list
    cuts = [(leaf, _Slicing.of(leaf.view)) for leaf in leaves]

    def unite(arrays: Iterable[jax.Array]) -> list[jax.Array]:
        remaining = iter(arrays)
        return [cut.unite(remaining, leaf.array.shape) for leaf, cut in cuts]

    return [piece for leaf, cut in cuts for piece in cut.divide(leaf)], unite


def pieces_of(view: MatrixView) -> list[Piece]:
    """Returns the pieces of a whole leaf."""
    return _Slicing.of(view).pieces


def along_outputs(
    view: MatrixView, of_piece: Callable[[MatrixView], float]
) -> np.ndarray:
    """Returns a number per piece, spread along the outputs to multiply the leaf."""
    numbers = [of_piece(piece.view) for piece in pieces_of(view)]
    # If all pieces have one number, it is one entry, and takes no pass over memory.
    if len(set(numbers)) == 1:
        return np.full((1,) * len(view.shape), numbers[0])
    assert view.division is not None
    group = np.repeat(numbers, [size for size, _ in view.division.parts])
    shape = [n if i in view.output else 1 for i, n in enumerate(view.shape)]
    return np.tile(group, view.division.groups).reshape(shape)


class _Axis(NamedTuple):
    """An axis of a leaf, or a factor of one, after a reshape.

    - `leaf_axis`: the leaf's axis that it is, or is the major factor of. A mesh cuts an
        axis into consecutive blocks, and so only its major factor.
    - `inner`: how many outputs one step along it passes; 0 for other axes.
    """

    size: int
    leaf_axis: int | None
    inner: int = 0


@dataclasses.dataclass(frozen=True)
class _Slicing:
    """How a leaf is reshaped, `(*before, *groups, units, *rest, *after)`, and sliced.

    A part is a run of units. If there is one part, there is no axis of units.
    """

    shape: tuple[int, ...]  # of the whole leaf
    axes: list[_Axis]
    sliced: int  # the axis of units, if there are several pieces
    pieces: list[Piece]

    @classmethod
    def of(cls, view: MatrixView) -> "_Slicing":
        plain = [_Axis(n, i) for i, n in enumerate(view.shape)]
        if view.division is None:
            return cls(view.shape, plain, 0, [Piece(view, plain)])
        parts = view.division.parts
        first, stop = view.output[0], view.output[-1] + 1
        before, after = plain[:first], plain[stop:]
        outputs, inner = [], 1
        for axis in reversed(plain[first:stop]):
            outputs.insert(0, axis._replace(inner=inner))
            inner *= axis.size
        # All parts begin and end at a multiple of their greatest common divisor, the
        # unit: slices of an axis of units are parts of any sizes.
        sizes = [size for size, _ in parts]
        group, unit = sum(sizes), math.gcd(*sizes)
        outputs = _factored(outputs, {group, unit})
        groups = [a for a in outputs if a.inner >= group]
        rest = [a for a in outputs if a.inner < unit]

        def units(count: int) -> list[_Axis]:
            # A mesh does not cut a sliced axis: a block would not have whole slices.
            return [_Axis(count, None, unit)] if len(parts) > 1 else []

        pieces, stop = [], 0
        for size, head_dim in parts:
            start, stop = stop, stop + size // unit
            part_axes = units(stop - start) + rest
            if head_dim is not None:
                part_axes = _factored(part_axes, {head_dim})
            axes = [*before, *groups, *part_axes, *after]
            # Outputs alone have an `inner`, which is 1 at least.
            index_of = {a.leaf_axis: j for j, a in enumerate(axes) if not a.inner}
            # A part that stays whole is one matrix of all its groups.
            indices = range(len(before), len(before) + len(groups) + len(part_axes))
            stacked = [
                j for j in indices if head_dim is not None and axes[j].inner >= head_dim
            ]
            piece_view = MatrixView(
                (*(index_of[j] for j in view.batch), *stacked),
                tuple(index_of[j] for j in view.reduction),
                tuple(j for j in indices if j not in stacked),
                tuple(a.size for a in axes),
                view.is_directed,
            )
            pieces.append(Piece(piece_view, axes, (start, stop)))
        axes = [*before, *groups, *units(stop), *rest, *after]
        return cls(view.shape, axes, len(before) + len(groups), pieces)

    def divide(self, leaf: MatrixLeaf) -> list[MatrixLeaf]:
        # `lax.reshape` to the shape that an array has is no operation: a leaf of one
        # piece, or of heads that have axes already, is not copied.
        local = self._local(leaf.array.shape)
        slices = [jax.lax.reshape(leaf.array, local(self.axes))]
        if len(self.pieces) > 1:
            cut = functools.partial(jax.lax.slice_in_dim, *slices, axis=self.sliced)
            slices = [cut(*piece.units) for piece in self.pieces]
        entries = dict(enumerate(leaf.spec))
        return [
            MatrixLeaf(
                jax.lax.reshape(x, local(piece.axes)),
                piece.view,
                PartitionSpec(*map(entries.get, piece.leaf_axes)),  # type: ignore[arg-type]
            )
            for x, piece in zip(slices, self.pieces, strict=True)
        ]

    def unite(self, arrays: Iterator[jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """Returns a leaf, or block, of this shape, from the next pieces of `arrays`."""
        if len(self.pieces) == 1:
            return jax.lax.reshape(next(arrays), shape)
        local = self._local(shape)
        before, after = self.axes[: self.sliced], self.axes[self.sliced + 1 :]
        slices = [
            jax.lax.reshape(next(arrays), (*local(before), stop - start, *local(after)))
            for start, stop in (piece.units for piece in self.pieces)
        ]
        return jax.lax.reshape(jnp.concatenate(slices, self.sliced), shape)

    def _local(self, shape: tuple[int, ...]) -> Callable[[Sequence[_Axis]], list[int]]:
        """Makes a function from axes to their sizes in a block of this shape."""
        # A mesh cuts major factors alone, so that a block has all of every other.
        counts = [n // m for n, m in zip(self.shape, shape, strict=True)]
        return lambda axes: [
            a.size if a.leaf_axis is None else a.size // counts[a.leaf_axis]
            for a in axes
        ]


def _factored(axes: Sequence[_Axis], strides: Collection[int]) -> list[_Axis]:
    """Splits axes so that each of the strides is the stride of one of them."""
    factors = []
    for axis in axes:
        stop = axis.size * axis.inner
        inside = sorted(n for n in strides if axis.inner < n < stop)
        bounds = [axis.inner, *inside, stop]
        # Each stride has to divide the next: axes (3, 64) have strides of 64 and 192,
        # but not of 96.
        if any(high % low for low, high in itertools.pairwise(bounds)):
            # A part or a head ends inside a step along an axis. All axes become one,
            # which can be cut anywhere.
            size = math.prod(a.size for a in axes)
            major = next((a.leaf_axis for a in axes if a.size > 1), None)
            return _factored([_Axis(size, major, axes[-1].inner)], strides)
        for low, high in reversed(list(itertools.pairwise(bounds))):
            major = axis.leaf_axis if high == stop else None
            factors.append(_Axis(high // low, major, low))
    return factors

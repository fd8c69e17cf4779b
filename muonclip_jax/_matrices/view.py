"""A parameter leaf seen as a stack of matrices, and back."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from .._options import whole_number
from .axes import Axes, MatrixAxes


class Division(NamedTuple):
    """How the outputs are matrices next to one another: groups of the same parts.

    A part with a `head_dim` is one matrix for each head of each group; one without is
    one matrix of all groups.
    """

    groups: int
    parts: tuple[int, ...]
    head_dims: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """The matrices of one leaf: the axes of a stack of `(fan_in, fan_out)`.

    With a `division` the leaf is several of them (`pieces_of`).
    """

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    shape: tuple[int, ...]
    # Whether it is known which of the two is the input.
    is_directed: bool = dataclasses.field(default=True, compare=False)
    division: Division | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape[axis] for axis in self.batch)

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[axis] for axis in self.reduction)

    @property
    def fan_out(self) -> int:
        return math.prod(self.shape[axis] for axis in self.output)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.fan_in, self.fan_out

    @property
    def wide(self) -> "MatrixView":
        """The same matrices with the short side first: tall ones are transposed."""
        if self.fan_in <= self.fan_out:
            return self
        axes = {"reduction": self.output, "output": self.reduction}
        return dataclasses.replace(self, **axes)

    def to_matrices(self, leaf: jax.Array) -> jax.Array:
        """Returns the leaf as `(count, fan_in, fan_out)`."""
        order = self.batch + self.reduction + self.output
        shape = self.count, *self.matrix_shape
        return jax.lax.reshape(jax.lax.transpose(leaf, order), shape)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `to_matrices`."""
        order = self.batch + self.reduction + self.output
        moved = jax.lax.reshape(matrices, [self.shape[axis] for axis in order])
        return jax.lax.transpose(
            moved, sorted(range(len(order)), key=order.__getitem__)
        )


def matrix_view(shape: tuple[int, ...], numbers: Axes) -> MatrixView:
    """Reads axes against a shape; all axes they leave out are batch."""

    def axes_of(given: Any) -> tuple[int, ...]:
        given = tuple(given) if isinstance(given, Iterable) else (given,)
        found = [whole_number("an axis", axis) for axis in given]
        for axis in found:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"axis {axis} is out of range for {len(shape)} dimensions"
                )
        return tuple(axis % len(shape) for axis in found)

    reduction, output = axes_of(numbers.reduction_axis), axes_of(numbers.output_axis)
    named = reduction + output
    if not reduction or not output or len(set(named)) < len(named):
        raise ValueError(
            f"reduction and output axes must be distinct and not empty, got {numbers}"
        )
    batch = tuple(i for i in range(len(shape)) if i not in named)
    view = MatrixView(batch, reduction, output, tuple(shape))
    if not isinstance(numbers, MatrixAxes):
        return view
    return dataclasses.replace(view, division=_division(view, numbers))


def _division(view: MatrixView, axes: MatrixAxes) -> Division | None:
    outputs, groups, parts = view.fan_out, axes.groups, axes.parts
    if parts is None:
        parts = (outputs // groups,)
    if sum(parts) * groups != outputs:
        times = f"{groups} times " if groups > 1 else ""
        raise ValueError(
            f"{times}the parts {list(parts)} are {sum(parts) * groups} outputs, but "
            f"the leaf has {outputs}"
        )
    if any(j != i + 1 for i, j in itertools.pairwise(view.output)):
        raise ValueError(
            f"the outputs {axes.output_axis} are cut into parts, so they have to be "
            "axes next to one another, in their order"
        )
    head_dims = axes.head_dim
    if not isinstance(head_dims, tuple):
        head_dims = (head_dims,) * len(parts)
    for part, head_dim in zip(parts, head_dims, strict=True):
        if head_dim is not None and part % head_dim:
            raise ValueError(f"head_dim={head_dim} does not divide the {part} outputs")
    if groups == 1:
        # A part of one group is one matrix, as a part of one head is.
        head_dims = tuple(h or n for h, n in zip(head_dims, parts, strict=True))
    # Pieces of one size that follow one another are heads: one reshape in place of many
    # slices, and a mesh may cut between any two of them.
    size = head_dims[0] if len(set(head_dims)) == 1 else None
    if size is not None:
        groups, parts, head_dims = outputs // size, (size,), (size,)
    elif groups == 1:
        pieces = list(zip(parts, head_dims, strict=True))
        period = next(
            n
            for n in range(1, len(pieces) + 1)
            if pieces == pieces[:n] * (len(pieces) // n)
        )
        groups = len(pieces) // period
        parts, head_dims = parts[:period], head_dims[:period]
    merged: list[tuple[int, int | None]] = []
    for part, head_dim in zip(parts, head_dims, strict=True):
        if merged and head_dim is not None and merged[-1][1] == head_dim:
            merged[-1] = merged[-1][0] + part, head_dim
        else:
            merged.append((part, head_dim))
    if len(merged) == 1 and merged[0][1] in (None, outputs):
        return None
    sizes, heads = zip(*merged, strict=True)
    return Division(groups, sizes, heads)

"""A parameter leaf seen as a stack of matrices, and back."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from .._options import whole_number


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """The matrices of one leaf: the axes of a stack of `(fan_in, fan_out)`."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    shape: tuple[int, ...]
    # Whether it is known which of the two is the input.
    is_directed: bool = dataclasses.field(default=True, compare=False)

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
        shape = self.count, *self.matrix_shape
        return jax.lax.reshape(jax.lax.transpose(leaf, self._order), shape)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        moved = jax.lax.reshape(matrices, [self.shape[axis] for axis in self._order])
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return jax.lax.transpose(moved, inverse)

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch + self.reduction + self.output


def matrix_view(shape: tuple[int, ...], numbers: MuonDimensionNumbers) -> MatrixView:
    """Reads dimension numbers against a shape; all axes they leave out are batch."""

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
    return MatrixView(batch, reduction, output, tuple(shape))

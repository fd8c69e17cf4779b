"""A step of Newton-Schulz on matrices that are stored in units of their own.

A stored `x` stands for `X = size x`, and `r` for `X X^T = unit r`. A step of slope `a`
makes the size `a` times as large, and of `x` it makes `z x + x`, where
`a z = b R + c R^2`: a product plus what is there already, which a library for GPU
forms at once, in float32, and rounds once.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from .coefficients import Triple


class Step(NamedTuple):
    """`growth (z + keep I)` for X, with `growth z = linear R + square R^2`."""

    growth: Any
    keep: Any  # 1, unless the slope is 0
    linear: Any
    square: Any

    @staticmethod
    def of(triple: Triple) -> "Step":
        a, b, c = triple
        return Step(a, 1.0, b, c) if a else Step(1.0, 0.0, b, c)

    @staticmethod
    def of_traced(triple: Any) -> "Step":
        """Does not grow, for there may be any number of steps."""
        return Step(1.0, *triple)

    def polynomial(self, unit: Any) -> tuple[Any, Any]:
        """The coefficients of r^2 and of r in z."""
        return self.square * unit**2 / self.growth, self.linear * unit / self.growth


def growth_of(steps: Sequence[Step]) -> float:
    """The most by which the size of an X grows."""
    return math.prod(step.growth for step in steps)


class Range(NamedTuple):
    """The sizes with which a dtype holds X, `X X^T = unit r`, and products of r.

    Beyond the largest units what is rounded below the smallest normal number would be
    more than what is rounded elsewhere.
    """

    first_size: float = 1.0  # before the first step, where the Frobenius norm of X is 1
    size: float = 1.0  # later, where its singular values are below 2
    unit: float = math.inf  # the largest for r
    unit_of_square: float = math.inf  # and for an r whose square is rounded too


# So r^2 is at most 15^4 in the first step, and (2 * 7)^4 later.
_RANGES = {"float16": Range(1 / 15, 1 / 7, unit=128.0, unit_of_square=8.0)}


def range_of(dtype: DTypeLike) -> Range:
    return _RANGES.get(jnp.dtype(dtype).name, Range())

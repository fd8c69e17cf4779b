r"""Momentum in 8 bits: the largest directions as vectors, the rest a code per entry.

$$M \approx P Q^\top + D(C) \odot \min(r, c), \qquad D(C) = \frac{C}{254 - |C|}$$

Rounding spreads evenly over all directions, and orthogonalization lifts the small ones
to the size of the large: an error of 0.5 % of the large ones drowns the small. So the
large ones, $P Q^\top$, are coded by themselves, and only the rest is rounded entry by
entry, on the scale of its row $r$ or its column $c$, whichever is smaller.
"""

import functools
import math
import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._layout.state import StatePart
from .._matrices.stacks import MatrixView
from .._parameters.paths import Path


LARGEST = 127  # code
#: The most bytes per entry besides its code, 1.06 in all. A matrix of 68 x 68 affords
#: its scales, one of 101 x 101 the first direction, 768 x 768 twenty.
OVERHEAD = 0.0595
#: More directions make a step of subspace iteration slower.
MOST_DIRECTIONS = 32
#: Smaller eigenvalues of a Gram matrix, relative to its trace, are lost in float32.
RIDGE = 1e-6


class Vectors(NamedTuple):
    """Codes of vectors, each on the scale of its largest entry."""

    codes: jax.Array  # int8
    scale: jax.Array  # float32

    def decode(self) -> jax.Array:
        return _decoded(self.codes) * self.scale


class Directions(NamedTuple):
    """The largest directions of the matrices of a leaf.

    In `left` the first output axis counts them, and the other output axes have size 1;
    `right` is the same with the reduction axes.
    """

    left: Vectors
    right: Vectors


class Scales(NamedTuple):
    """The state of a leaf besides the codes of its entries."""

    rows: jax.Array  # bfloat16, the leaf's shape with 1 along the output axes
    columns: jax.Array  # bfloat16, with 1 along the reduction axes
    directions: Directions | None  # `None` for small matrices


def number_of_directions(view: MatrixView) -> int:
    """Returns the number for which scales and directions stay within `OVERHEAD`."""
    # A direction takes a byte for every row and column, so the scales of rows and
    # columns, in bfloat16, take as much as two directions.
    sides = view.fan_in + view.fan_out
    affordable = OVERHEAD * view.fan_in * view.fan_out / sides
    return max(0, min(MOST_DIRECTIONS, math.floor(affordable - 2)))


def parts_of_scales(path: Path, view: MatrixView) -> Any:
    """Describes the scale arrays of a leaf: a tree of parts of its state."""
    rows, columns = dict.fromkeys(view.output, 1), dict.fromkeys(view.reduction, 1)
    part: Any = functools.partial(StatePart, path)
    scales = part(jnp.bfloat16, rows), part(jnp.bfloat16, columns)
    count = number_of_directions(view)
    if not count:
        return Scales(*scales, None)

    def vectors(along: dict[int, int], others: dict[int, int]) -> Vectors:
        return Vectors(part(jnp.int8, others), part(jnp.float32, {**along, **others}))

    left = vectors(columns, rows | {view.output[0]: count})
    right = vectors(rows, columns | {view.reduction[0]: count})
    return Scales(*scales, Directions(left, right))


def decode(codes: jax.Array, scales: Scales, view: MatrixView) -> jax.Array:
    """Returns the momentum in float32."""
    rest = _decoded(codes) * _scale_of_entries(scales.rows, scales.columns)
    if scales.directions is None:
        return rest
    return _low_rank(scales.directions, view) + rest


def encode(
    momentum: jax.Array, last: Scales, view: MatrixView
) -> tuple[jax.Array, Scales]:
    """Codes a momentum, whose directions are close to those in `last`."""
    directions, rest = None, momentum
    if last.directions is not None:
        directions = _subspace_step(momentum, last.directions.right, view)
        rest = momentum - _low_rank(directions, view)
    # The smaller of the scales of its row and its column bounds an entry: one that is
    # large does not make the scales of the others in its row coarse.
    size = jnp.abs(rest)
    # The maximum may lose a NaN, which the sum keeps (`keep_nan`).
    zero_or_nan = 0 * jnp.sum(size, view.output, keepdims=True)
    rows = _at_least(jnp.max(size, view.output, keepdims=True) + zero_or_nan)
    columns = _at_least(jnp.max(size, view.reduction, keepdims=True))
    share = _divided(rest, _scale_of_entries(rows, columns))
    return _code(share), Scales(rows, columns, directions)


def _decoded(code: jax.Array) -> jax.Array:
    """Returns the share of its scale that a code stands for; steps are finer near 0."""
    # At a share s the step is (1 + s)^2 / 254. Most entries of momentum are a small
    # share of the largest in their row, where this is half of a uniform step.
    code = code.astype(jnp.float32)
    return code / (2 * LARGEST - jnp.abs(code))


def _code(share: jax.Array) -> jax.Array:
    # s = C / (254 - |C|), solved for C: C (1 + |s|) = 254 s.
    return jnp.round(2 * LARGEST * share / (1 + jnp.abs(share))).astype(jnp.int8)


def _scale_of_entries(rows: jax.Array, columns: jax.Array) -> jax.Array:
    return jnp.minimum(rows, columns).astype(jnp.float32)


def _at_least(x: jax.Array) -> jax.Array:
    """Rounds a scale up, so that no share of it exceeds 1."""
    # Rounding to bfloat16 takes at most 2^-8 of a number, half of what is added.
    return (x * (1 + 2.0**-7)).astype(jnp.bfloat16)


def _divided(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.where(scale == 0, 1, scale)


def _subspace_step(momentum: jax.Array, right: Vectors, view: MatrixView) -> Directions:
    """Takes a step of subspace iteration."""
    # Momentum changes little from step to step, so its last directions are close: one
    # product with M and one with its transpose follow them (Halko, Martinsson and
    # Tropp, arXiv:0909.4061, algorithm 4.4).
    m, p, q = _axes(view)
    start = _decoded(right.codes) + _pattern(right.codes, view)
    image = _orthonormal(_product(f"{m},{q}->{p}", momentum, start), view)
    left = _vectors(image, view.reduction)
    projection = _product(f"{m},{p}->{q}", momentum, left.decode())
    return Directions(left, _vectors(projection, view.output))


def _low_rank(directions: Directions, view: MatrixView) -> jax.Array:
    m, p, q = _axes(view)
    return _product(f"{p},{q}->{m}", *(x.decode() for x in directions))


def _axes(view: MatrixView) -> tuple[str, str, str]:
    """Returns letters for the axes of a leaf, of its left and its right directions.

    A "z" counts directions, and a "." is an axis of size 1.
    """
    letters = string.ascii_lowercase[: len(view.shape)]

    def counted(first: int, *others: int) -> str:
        names = {first: "z", **dict.fromkeys(others, ".")}
        return "".join(names.get(i, letter) for i, letter in enumerate(letters))

    return letters, counted(*view.output), counted(*view.reduction)


def _product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.einsum` in full precision, with "." for axes of size 1."""
    inputs, output = formula.split("->")
    arrays = [
        jnp.squeeze(array, [i for i, name in enumerate(names) if name == "."])
        for names, array in zip(inputs.split(","), (x, y), strict=True)
    ]
    result = jnp.einsum(formula.replace(".", ""), *arrays, precision="highest")
    return jnp.expand_dims(result, [i for i, name in enumerate(output) if name == "."])


def _vectors(x: jax.Array, axes: tuple[int, ...]) -> Vectors:
    scale = jnp.max(jnp.abs(x), axes, keepdims=True)
    return Vectors(_code(_divided(x, scale)), scale)


def _pattern(like: jax.Array, view: MatrixView) -> jax.Array:
    """Returns a small part along every direction, so that new ones are found."""
    # Cosines of different frequencies are nearly orthogonal to each other and to the
    # directions, and are the same on all devices and in every run.
    along = [jax.lax.broadcasted_iota(jnp.float32, like.shape, i) for i in view.output]
    place = sum(x * math.sqrt(2 + n) for n, x in enumerate(along))
    count = jax.lax.broadcasted_iota(jnp.float32, like.shape, view.reduction[0])
    return jnp.cos((count + 1) * place) / LARGEST


def _orthonormal(image: jax.Array, view: MatrixView) -> jax.Array:
    """Returns orthonormal columns of the same span, as far as float32 resolves it."""
    _, p, _ = _axes(view)
    largest = jnp.max(jnp.abs(image), (*view.reduction, *view.output), keepdims=True)
    y, other = _divided(image, largest), p.replace("z", "y")
    stack = "".join(p[i] for i in view.batch)
    gram = _product(f"{p},{other}->{stack}zy", y, y)
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    one = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    ridged = gram + RIDGE * jnp.where(trace == 0, 1, trace) * one
    # Columns times the inverse of Cholesky's factor of their Gram matrix: with
    # Y^T Y = L L^T, the Gram matrix of Y L^-T is L^-1 (L L^T) L^-T, the identity. The
    # ridge keeps L regular where columns depend on each other, or are zero.
    inverse = jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(ridged), one, lower=True
    )
    return _product(f"{p},{stack}yz->{other}", y, inverse)

r"""Momentum in 8 bits: its largest directions apart, and the rest in one code an entry.

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
#: Bytes an entry, on top of its code: with it momentum takes at most 1.06. A matrix of
#: 68 x 68 affords its scales, one of 101 x 101 the first direction, 768 x 768 twenty.
OVERHEAD = 0.0595
#: The time of a step of subspace iteration grows with them.
MOST_DIRECTIONS = 32
#: float32 resolves no smaller eigenvalues of a Gram matrix.
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
    """All but the codes of the entries of a leaf."""

    rows: jax.Array  # bfloat16, the leaf's shape with 1 along the output axes
    columns: jax.Array  # bfloat16, with 1 along the reduction axes
    directions: Directions | None  # of small matrices none


def number_of_directions(view: MatrixView) -> int:
    """The number that keeps all that is not a code within `OVERHEAD`."""
    # A direction is a byte for every row and every column; the scales of rows and of
    # columns, in bfloat16, are as much as two directions.
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
    """The momentum in float32."""
    rest = _decoded(codes) * _scale_of_entries(scales.rows, scales.columns)
    if scales.directions is None:
        return rest
    return _low_rank(scales.directions, view) + rest


def encode(
    momentum: jax.Array, last: Scales, view: MatrixView
) -> tuple[jax.Array, Scales]:
    """Codes a momentum of which the directions are like those of the last one."""
    directions, rest = None, momentum
    if last.directions is not None:
        directions = _subspace_step(momentum, last.directions.right, view)
        rest = momentum - _low_rank(directions, view)
    # The smaller of the scales of its row and its column bounds an entry: a large entry
    # then costs the others of its row their precision only in its own column.
    size = jnp.abs(rest)
    # A maximum may pass over what is not a number; a sum does not.
    nothing = 0 * jnp.sum(size, view.output, keepdims=True)
    rows = _at_least(jnp.max(size, view.output, keepdims=True) + nothing)
    columns = _at_least(jnp.max(size, view.reduction, keepdims=True))
    share = _divided(rest, _scale_of_entries(rows, columns))
    return _code(share), Scales(rows, columns, directions)


def _decoded(code: jax.Array) -> jax.Array:
    """The share of its scale that a code stands for, in steps finer near zero."""
    # The step at a share s is (1 + s)^2 / 254: of the entries of a row of momentum most
    # are a small share of the largest, and have steps of half the size there.
    code = code.astype(jnp.float32)
    return code / (2 * LARGEST - jnp.abs(code))


def _code(share: jax.Array) -> jax.Array:
    # s = C / (254 - |C|), solved for C: C (1 + |s|) = 254 s.
    return jnp.round(2 * LARGEST * share / (1 + jnp.abs(share))).astype(jnp.int8)


def _scale_of_entries(rows: jax.Array, columns: jax.Array) -> jax.Array:
    return jnp.minimum(rows, columns).astype(jnp.float32)


def _at_least(x: jax.Array) -> jax.Array:
    """Rounds up, so that no share of it exceeds 1."""
    # To the nearest bfloat16 a number loses at most 2^-8 of it, half of what is added.
    return (x * (1 + 2.0**-7)).astype(jnp.bfloat16)


def _divided(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.where(scale == 0, 1, scale)


def _subspace_step(momentum: jax.Array, right: Vectors, view: MatrixView) -> Directions:
    """One step of subspace iteration."""
    # Momentum changes little from step to step, so the directions of the last one are
    # close to those of this one, and one product there and back with it follows them
    # (Halko, Martinsson and Tropp, arXiv:0909.4061, algorithm 4.4, from a good start).
    m, p, q = _axes(view)
    start = _decoded(right.codes) + _pattern(right.codes, view)
    image = _orthonormal(_product(f"{m},{q}->{p}", momentum, start), view)
    left = _vectors(image, view.reduction)
    found = _product(f"{m},{p}->{q}", momentum, left.decode())
    return Directions(left, _vectors(found, view.output))


def _low_rank(directions: Directions, view: MatrixView) -> jax.Array:
    m, p, q = _axes(view)
    return _product(f"{p},{q}->{m}", *(x.decode() for x in directions))


def _axes(view: MatrixView) -> tuple[str, str, str]:
    """Letters for the axes of a leaf, of its left and its right directions.

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
    """A little of every direction, by which new ones are noticed."""
    # Cosines of different frequencies are nearly orthogonal to each other and to what
    # is there, and are the same on all devices and in every run.
    along = [jax.lax.broadcasted_iota(jnp.float32, like.shape, i) for i in view.output]
    place = sum(x * math.sqrt(2 + n) for n, x in enumerate(along))
    count = jax.lax.broadcasted_iota(jnp.float32, like.shape, view.reduction[0])
    return jnp.cos((count + 1) * place) / LARGEST


def _orthonormal(image: jax.Array, view: MatrixView) -> jax.Array:
    """Orthonormal columns of the same span, as far as float32 resolves it."""
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

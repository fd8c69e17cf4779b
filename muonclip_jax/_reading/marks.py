"""Marks of arrays, and the operations that take them back through an equation.

The marks of an array are an array, too, with one entry for each of its entries, or one
along a dimension where they do not vary. They go from a result to an operand by the
transpose of the operation, with a union in place of a sum: an entry of the operand gets
the marks of all entries to which it contributes. A mark for every head, put on the
logits of attention, thus arrives at the parameters as the heads that each of their
entries serves.

In front of the array's own dimensions, its marks have one for every loop and every axis
of a mesh around it: its `lead`, along which are trips and devices. A mark is bits, of
Python integers or of `int64`, joined by `or`; or floats, joined by their maximum.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._parameters.paths import Shape


Marks = np.ndarray


# The largest marks that `placed` makes. With positions and one more axis, marks would
# be as large as activations; the marks of another axis show which entries are not
# reached. Exact marks, of heads, have to show that themselves.
_LARGEST = {"O": 1 << 22, "i": 1 << 16, "f": 1 << 16}


def nothing(marks: Marks) -> Any:
    """Returns the mark of entries that contribute to nothing."""
    return -np.inf if marks.dtype.kind == "f" else 0


def is_empty(marks: Marks) -> bool:
    """Whether no entry has a mark."""
    if marks.size and marks.item(0) != nothing(marks):  # the common case, fast
        return False
    return not (marks if nothing(marks) == 0 else marks > -np.inf).any()


def _union(marks: Marks) -> np.ufunc:
    return np.maximum if marks.dtype.kind == "f" else np.bitwise_or


def union_along(marks: Marks, axes: Iterable[int]) -> Marks:
    """Returns the union along axes, which keep one entry."""
    for axis in axes:
        if marks.shape[axis] > 1:
            marks = _union(marks).reduce(marks, axis=axis, keepdims=True)
    return marks


def union_of(a: Marks, b: Marks) -> Marks:
    """Returns the union of two arrays of marks."""
    # NumPy returns a scalar for arrays without axes, such as a temperature's marks.
    return np.asarray(_union(a)(a, b), a.dtype)


def key_of(marks: Marks) -> Any:
    """Returns a key that is the same for equal marks."""
    is_exact = marks.dtype.kind == "O"
    return marks.shape, tuple(marks.ravel().tolist()) if is_exact else marks.tobytes()


def union_but(marks: Marks, axes: Iterable[int]) -> Marks:
    """Returns the union along all axes except some."""
    kept = {*axes}
    return union_along(marks, (a for a in range(marks.ndim) if a not in kept))


def marks_along(marks: Marks, axis: int) -> Marks:
    """Returns the marks along one axis."""
    return union_but(marks, [axis]).ravel()


def distinct(marks: Marks) -> set[int]:
    """Returns all different marks, without the empty one."""
    return {*marks.ravel().tolist()} - {0}


def is_varied(marks: Marks) -> bool:
    """Whether entries have different marks; entries without a mark do not count."""
    if marks.size < 2:
        return False
    first, last = marks.item(0), marks.item(-1)
    if first and last and first != last:  # the common case, fast
        return True
    if marks.dtype.kind == "O":
        return len(distinct(marks)) > 1
    marked = marks[marks != 0]
    return marked.size > 1 and bool((marked != marked[0]).any())


def varied(marks: Marks) -> list[int]:
    """Returns the axes along which entries have different marks."""
    axes = (a for a, n in enumerate(marks.shape) if n > 1)
    return [a for a in axes if is_varied(marks_along(marks, a))]


def small(marks: Marks) -> Marks:
    """Returns the marks with one entry along axes where all entries are the same."""
    if marks.size < 2:
        return marks
    for axis, n in enumerate(marks.shape):
        if n == marks.size and marks.item(0) != marks.item(-1):
            return marks  # the common case, fast
        if n > 1:
            first = marks[(*[slice(None)] * axis, slice(1))]
            if (marks == first).all():
                marks = first
    return marks


def full(marks: Marks, axis: int, size: int) -> Marks:
    """Returns the marks with all entries along an axis."""
    return np.repeat(marks, size, axis) if marks.shape[axis] == 1 else marks


def numbered(rank: int, axis: int, size: int, exact: bool = False) -> Marks:
    """Returns marks with a different mark for every entry along an axis.

    An exact mark is one bit. The others have two bits for every binary digit of the
    entry's number, one of which is set, so the union of two entries never equals the
    mark of one. They show in 64 bits where marks vary, too long for one bit per
    entry.
    """
    shape = [size if i == axis else 1 for i in range(rank)]
    if exact:
        marks = np.empty(size, object)
        marks[:] = [1 << i for i in range(size)]
        return marks.reshape(shape)
    return _numbers(size).reshape(shape)


@functools.lru_cache(maxsize=64)
def _numbers(size: int) -> Marks:
    numbers, marks = np.arange(size), np.zeros(size, np.int64)
    for digit in range(max(1, (size - 1).bit_length())):
        marks |= 1 << (2 * digit + (numbers >> digit & 1))
    marks.setflags(write=False)
    return marks


def total(marks: Marks) -> int:
    """Returns the union of all integer marks of an array."""
    return int(_union(marks).reduce(marks, axis=None))


def is_disjoint(a: int, b: int, is_exact: bool) -> bool:
    """Whether two unions of marks, as `numbered` makes them, surely share no entry."""
    if is_exact:
        return not a & b
    # For each digit there are two bits, and every entry has one of them.
    digits = [x | x >> 1 for x in (a, b, a & b)]
    return bool(digits[0] & digits[1] & ~digits[2] & _EVEN)


_EVEN = int("01" * 32, 2)


def dimensions(
    rank: int, shape: Shape, lead: int, on_devices: bool
) -> tuple[Marks, ...]:
    """Returns marks for every dimension of an array, with a different one along it.

    On devices a dimension of one entry may be a block of a larger one. It gets two
    marks, which show where it goes when blocks are put together.
    """
    least = 2 if on_devices else 1
    return tuple(numbered(rank, lead + d, max(n, least)) for d, n in enumerate(shape))


def placed(marks: Marks, axis: int, size: int, part: slice) -> Marks:
    """Returns the marks of the array that a slice was taken from, empty around it."""
    if marks.shape[axis] == 1 and marks.size * size > _LARGEST[marks.dtype.kind]:
        return marks  # too large to show where the slice is: marks all entries
    shape = [size if i == axis else n for i, n in enumerate(marks.shape)]
    whole = np.full(shape, nothing(marks), marks.dtype)
    whole[(*[slice(None)] * axis, part)] = marks
    return whole


def placed_at(marks: Marks, axis: int, size: int, indices: np.ndarray) -> Marks:
    """Returns the marks of the array that entries were picked from, empty elsewhere.

    `indices` has the axes of the marks. Its entries are the places along `axis`, which
    may differ in each trip and for each index.
    """
    shape = np.broadcast_shapes(marks.shape, indices.shape)
    whole_shape = [size if i == axis else n for i, n in enumerate(shape)]
    if math.prod(whole_shape) > _LARGEST["O"]:
        return union_along(marks, [axis])
    whole = np.full(whole_shape, nothing(marks), marks.dtype)
    places = np.broadcast_to(indices, shape)
    np.put_along_axis(whole, places, np.broadcast_to(marks, shape), axis)
    return whole


def only_where(marks: Marks, is_in: np.ndarray) -> Marks:
    """Returns the marks without those of entries that take no part."""
    return np.where(is_in, marks, np.asarray(nothing(marks), marks.dtype))


def moved(marks: Marks, lead: int, to: Sequence[int | None]) -> Marks:
    """Returns the marks of an operand whose dimensions `to` maps to the result's.

    Dimensions that are summed over, or broadcast from one entry, map to `None`.
    """
    if marks.size == 1:
        return marks.reshape([1] * (lead + len(to)))
    kept = [lead + d for d in to if d is not None]
    gone = [i for i in range(lead, marks.ndim) if i not in kept]
    marks = union_along(marks, gone).transpose([*range(lead), *kept, *gone])
    sizes = iter(marks.shape[lead:])
    dims = [1 if d is None else next(sizes) for d in to]
    return marks.reshape((*marks.shape[:lead], *dims))


def reshaped(marks: Marks, lead: int, old: Shape, new: Shape) -> Marks:
    """Returns the marks of an array in shape `new`, from its marks in shape `old`.

    Dimensions are grouped into the shortest runs of the same size on both sides. A run
    gets all its entries only if the marks vary in it.
    """
    # A dimension of one entry may have two marks: see `dimensions`.
    for d, n in enumerate(old):
        if n == 1:
            marks = union_along(marks, [lead + d])
    sizes = list(marks.shape[:lead])
    for i, i2, j, j2 in _runs(old, new):
        axes = range(lead + i, lead + i2)
        if all(marks.shape[axis] == 1 for axis in axes):
            sizes += [1] * (j2 - j)
        else:
            for axis in axes:
                marks = full(marks, axis, old[axis - lead])
            sizes += new[j:j2]
    return small(marks.reshape(sizes))


@functools.lru_cache
def _runs(old: Shape, new: Shape) -> list[tuple[int, int, int, int]]:
    """Returns start and end, in both shapes, of the shortest runs of the same size."""
    # A reshape keeps the order of all entries. Two runs of dimensions with the same
    # product, after runs with the same product, thus hold the same entries: (6, 4) as
    # (2, 3, 4) is 6 as (2, 3), and 4 as 4. Within a run, only the order matches
    # entries.
    runs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        i2, j2 = min(i + 1, len(old)), min(j + 1, len(new))
        a, b = math.prod(old[i:i2]), math.prod(new[j:j2])
        while a != b:
            if a < b:
                a, i2 = a * old[i2], i2 + 1
            else:
                b, j2 = b * new[j2], j2 + 1
        runs.append((i, i2, j, j2))
        i, j = i2, j2
    return runs

"""Labels of arrays, and the operations that take them back through an equation.

A label has one entry for every entry of an array, or one along a dimension where it
does not vary. It goes from a result to an operand by the transpose of the operation,
with a union in place of a sum: an entry of the operand gets the marks of all entries to
which it contributes. A mark for every head, put on the logits of attention, thus
arrives at the parameters as the heads that each of their entries serves.

In front of the array's own dimensions, a label has one for every loop and every axis of
a mesh around it: its `lead`, along which are trips and devices. Marks are bits, of
Python integers or of `int64`, joined by `or`; or floats, joined by their maximum.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


Label = np.ndarray
Shape = tuple[int, ...]


# The largest label that `placed` makes. With positions and one more axis, labels would
# be as large as activations; the label of another axis shows which entries are not
# reached. Exact labels, of heads, have to show that themselves.
_LARGEST = {"O": 1 << 22, "i": 1 << 16, "f": 1 << 16}


def nothing(label: Label) -> Any:
    """Returns the mark of entries that contribute to nothing."""
    return -np.inf if label.dtype.kind == "f" else 0


def is_empty(label: Label) -> bool:
    """Whether no entry has a mark."""
    return not (label if nothing(label) == 0 else label > -np.inf).any()


def _union(label: Label) -> np.ufunc:
    return np.maximum if label.dtype.kind == "f" else np.bitwise_or


def joined(label: Label, axes: Iterable[int]) -> Label:
    """Returns the union along axes, which keep one entry."""
    for axis in axes:
        if label.shape[axis] > 1:
            label = _union(label).reduce(label, axis=axis, keepdims=True)
    return label


def either(a: Label, b: Label) -> Label:
    """Returns the union of two labels of one array."""
    return _union(a)(a, b)


def key_of(label: Label) -> Any:
    """Returns a key that is the same for equal labels."""
    is_exact = label.dtype.kind == "O"
    return label.shape, tuple(label.ravel().tolist()) if is_exact else label.tobytes()


def joined_but(label: Label, axes: Iterable[int]) -> Label:
    """Returns the union along all axes except some."""
    kept = {*axes}
    return joined(label, (a for a in range(label.ndim) if a not in kept))


def along(label: Label, axis: int) -> Label:
    """Returns the marks along one axis."""
    return joined_but(label, [axis]).ravel()


def distinct(label: Label) -> set[int]:
    """Returns all different marks of a label, without the empty one."""
    return {*label.ravel().tolist()} - {0}


def is_varied(label: Label) -> bool:
    """Whether entries have different marks; entries without a mark do not count."""
    if label.dtype.kind == "O":
        return label.size > 1 and len(distinct(label)) > 1
    marked = label[label != 0]
    return marked.size > 1 and bool((marked != marked[0]).any())


def varied(label: Label) -> list[int]:
    """Returns the axes along which entries have different marks."""
    axes = (a for a, n in enumerate(label.shape) if n > 1)
    return [a for a in axes if is_varied(along(label, a))]


def small(label: Label) -> Label:
    """Returns the label with one entry along axes where all entries are the same."""
    for axis, n in enumerate(label.shape if label.size > 1 else ()):
        if n > 1:
            first = label[(*[slice(None)] * axis, slice(1))]
            if (label == first).all():
                label = first
    return label


def full(label: Label, axis: int, size: int) -> Label:
    """Returns the label with all entries along an axis."""
    return np.repeat(label, size, axis) if label.shape[axis] == 1 else label


def marks(rank: int, axis: int, size: int, exact: bool = False) -> Label:
    """Returns a label with a different mark for every entry along an axis.

    An exact mark is one bit. The others have two bits for every binary digit of the
    entry's number, one of which is set, so the union of two entries never equals the
    mark of one. They show in 64 bits where a label varies, too long for one bit per
    entry.
    """
    if exact:
        label = np.empty(size, object)
        label[:] = [1 << i for i in range(size)]
    else:
        numbers, label = np.arange(size), np.zeros(size, np.int64)
        for digit in range(max(1, (size - 1).bit_length())):
            label |= 1 << (2 * digit + (numbers >> digit & 1))
    return label.reshape([size if i == axis else 1 for i in range(rank)])


def dimensions(
    rank: int, shape: Shape, lead: int, on_devices: bool
) -> tuple[Label, ...]:
    """Returns one label with marks for every dimension of an array.

    On devices a dimension of one entry may be a block of a larger one. It gets two
    marks, which show where it goes when blocks are put together.
    """
    least = 2 if on_devices else 1
    return tuple(marks(rank, lead + d, max(n, least)) for d, n in enumerate(shape))


def placed(label: Label, axis: int, size: int, at: slice) -> Label:
    """Returns the label of the array that a slice was taken from, empty around it."""
    if label.shape[axis] == 1 and label.size * size > _LARGEST[label.dtype.kind]:
        return label  # too large to show where the slice is: marks all entries
    shape = [size if i == axis else n for i, n in enumerate(label.shape)]
    around = np.full(shape, nothing(label), label.dtype)
    around[(*[slice(None)] * axis, at)] = label
    return around


def moved(label: Label, lead: int, to: Sequence[int | None]) -> Label:
    """Returns the label of an operand whose dimensions `to` maps to the result's.

    Dimensions that are summed over, or broadcast from one entry, map to `None`.
    """
    if label.size == 1:
        return label.reshape([1] * (lead + len(to)))
    kept = [lead + d for d in to if d is not None]
    gone = [i for i in range(lead, label.ndim) if i not in kept]
    label = joined(label, gone).transpose([*range(lead), *kept, *gone])
    sizes = iter(label.shape[lead:])
    dims = [1 if d is None else next(sizes) for d in to]
    return label.reshape((*label.shape[:lead], *dims))


def reshaped(label: Label, lead: int, old: Shape, new: Shape) -> Label:
    """Returns the label of an array in shape `new`, from its label in shape `old`.

    Dimensions are grouped into the shortest runs of the same size on both sides. A run
    gets all its entries only if the label varies in it.
    """
    # one entry, one mark: see `dimensions`
    for d, n in enumerate(old):
        if n == 1:
            label = joined(label, [lead + d])
    sizes = list(label.shape[:lead])
    for i, i2, j, j2 in _runs(old, new):
        own = range(lead + i, lead + i2)
        if all(label.shape[axis] == 1 for axis in own):
            sizes += [1] * (j2 - j)
        else:
            for axis in own:
                label = full(label, axis, old[axis - lead])
            sizes += new[j:j2]
    return small(label.reshape(sizes))


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

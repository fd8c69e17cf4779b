"""Where a parameter carries heads, as a `HeadLeaf` says it."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .._model.head_leaf import HeadLeaf
from .pieces import Digit, Pieces, Shape


class _Axis(NamedTuple):
    """One axis of a leaf: what sizes it is cut into, which are of heads, which part."""

    sizes: Shape
    heads: tuple[int, ...]
    parts: tuple[tuple[int, slice], ...]


def head_digits(pieces: Pieces, dims: Sequence[int]) -> tuple[Digit, ...] | None:
    """The digits that tell heads apart, major first; `None` if pieces disagree."""
    found = {
        tuple(
            sorted(
                (d for d in p.digits if d.dim in dims and d.axis is not None),
                key=lambda d: (dims.index(d.dim), -d.step),
            )
        )
        for p in pieces
    }
    return found.pop() if len(found) == 1 else None


def covers(pieces: Pieces, dims: Sequence[int], sizes: Shape) -> bool:
    """Whether every head has entries of its own."""
    digits = head_digits(pieces, dims)
    return digits is not None and math.prod(d.size for d in digits) == math.prod(sizes)


def head_leaf(
    path: str, shape: Shape, pieces: Pieces, dims: Sequence[int], shared: bool = False
) -> HeadLeaf | None:
    """The leaf whose entries lie so in arrays of heads; `None` if it cannot say it.

    **Arguments:**

    - `path`, `shape`: of the leaf.
    - `pieces`: where its entries lie.
    - `dims`: of the heads in that array.
    - `shared`: whether all heads share it, as they do the gain of a norm.
    """
    digits = head_digits(pieces, dims)
    if digits is None:
        return None
    stacked = (d for p in pieces for d in p.digits if d.dim not in dims)
    stack = sorted({d.axis for d in stacked if (d.dim or 0) < 0 and d.axis is not None})
    if stack and stack != list(range(stack[0], stack[0] + len(stack))):
        return None
    axes = [i for i in range(len(shape)) if i not in stack]
    cut = [_axis(shape[i], i, pieces, digits) for i in axes]
    if any(axis is None for axis in cut):
        return None
    split = [i for i, axis in enumerate(cut) if axis and len(axis.sizes) > 1]
    # From the end, with one axis as several.
    ends: dict[tuple[int, int], int] = {}
    position = -sum(len(axis.sizes) for axis in cut if axis)
    for i, axis in enumerate(cut):
        for j in range(len(axis.sizes) if axis else 0):
            ends[i, j] = position
            position += 1
    heads = tuple(ends[i, j] for i, axis in enumerate(cut) if axis for j in axis.heads)
    parts = [
        (ends[i, j], where)
        for i, axis in enumerate(cut)
        if axis
        for j, where in axis.parts
    ]
    if len(split) > 1 or len(parts) > 1 or not _are_in_order(digits):
        return None
    sizes, split_axis = (), -1
    if split:
        sizes, split_axis = cut[split[0]].sizes, split[0] - len(axes)  # type: ignore
    elif not heads and not shared:
        # One head for all others: it has an axis of its own once one is cut.
        sizes, heads = (1, shape[axes[-1]]), (-2,)
    axis = heads[0] if len(heads) == 1 else heads or None
    at = stack[0] if stack and stack[0] else 0
    return HeadLeaf(
        path,
        len(axes),
        axis,
        tuple(sizes),
        parts[0] if parts else None,
        at,
        split_axis,
    )


def _are_in_order(digits: Sequence[Digit]) -> bool:
    """Whether heads are counted as the leaf's axes are; `HeadLeaf` transposes none."""
    order = [(d.axis, -d.stride) for d in digits]
    return order == sorted(order, key=str) or order == sorted(order)  # type: ignore


def _axis(n: int, axis: int, pieces: Pieces, digits: Sequence[Digit]) -> _Axis | None:
    own = sorted((d for d in digits if d.axis == axis), key=lambda d: -d.stride)
    if any(d.stride < 0 for d in own):
        return None
    held = _entries(axis, pieces, digits)
    sizes, heads, room = [], [], n
    for d in own:
        if room % (d.stride * d.size) == 0:
            outer = room // (d.stride * d.size)
            sizes += [outer] if outer > 1 else []
            sizes.append(d.size)
        elif room % d.stride == 0:
            sizes.append(room // d.stride)  # of which heads are a part
        else:
            return None
        heads.append(len(sizes) - 1)
        room = d.stride
    if room > 1 or not sizes:
        sizes.append(room)
    # The entries of the first head, in these sizes: a box, or `HeadLeaf` cannot say it.
    digits_of = [set() for _ in sizes]
    for entry in held:
        for j in reversed(range(len(sizes))):
            entry, place = divmod(entry, sizes[j])
            digits_of[j].add(place)
    if math.prod(map(len, digits_of)) != len(held):
        return None
    parts = []
    for j, places in enumerate(digits_of):
        low, high = min(places), max(places) + 1
        if len(places) != high - low:
            return None
        if j in heads:
            if len(places) > 1:
                return None
            high = low + own[heads.index(j)].size
        if (low, high) != (0, sizes[j]):
            parts.append((j, slice(low, high)))
    return _Axis(tuple(sizes), tuple(heads), tuple(parts))


def _entries(axis: int, pieces: Pieces, digits: Sequence[Digit]) -> set[int]:
    """Along an axis, the entries of the first head in the first layer of a stack."""
    found: set[int] = set()
    for p in pieces:
        others = [
            range(0, d.size * d.stride, d.stride)
            for d in p.digits
            if d.axis == axis and d not in digits and (d.dim is None or d.dim >= 0)
        ]
        found |= {p.offset[axis] + sum(at) for at in itertools.product(*others)}
    return found

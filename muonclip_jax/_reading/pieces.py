"""Where the entries of a source, such as a parameter, are in an array made of it.

The relation is affine, as CuTe's layouts are (github.com/NVIDIA/cutlass,
media/docs/cpp/cute/01_layout.md): splitting and merging of axes, transposing, slicing
and broadcasting lose nothing. A kernel of `(features, heads * head_dim)` that a reshape
cuts into heads is known to have a head for every head_dim entries of its axis.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


Shape = tuple[int, ...]

# More pieces than that are no layout of heads that anyone would write.
MOST_PIECES = 64

#: The dimension, of no array, along which an index picked an entry, unknown which.
#: Loops and devices are negative dimensions, too, from -1 on.
PICKED = -(10**9)

NO_LOOPS: Mapping[int, int | None] = MappingProxyType({})


class Digit(NamedTuple):
    """A counter that moves through an array and its source at once."""

    size: int
    # Counting by one moves `step` entries along this dimension of the array. `None`:
    # entries were summed over. A negative one is of no array but a loop's trips, in
    # each of which the array is another.
    dim: int | None = None
    step: int = 0
    # And `stride` entries along this axis of the source. `None`: entries are repeated.
    axis: int | None = None
    stride: int = 0


class Piece(NamedTuple):
    """Both indices are a start and what the digits add; all digits count separately."""

    digits: tuple[Digit, ...]  # in the order of `_tidy`: equal relations are equal
    start: Shape  # in the array
    offset: Shape  # in the source

    def span(self, dim: int) -> tuple[int, int]:
        """The range along a dimension of the array in which it has entries."""
        length = sum((d.size - 1) * d.step for d in self.digits if d.dim == dim)
        return self.start[dim], self.start[dim] + length + 1


#: Entries may come from the source in several ways, as in sums and concatenations.
Pieces = tuple[Piece, ...]


def whole(shape: Shape) -> Pieces:
    """The relation of a source with itself."""
    digits = [Digit(n, i, 1, i, 1) for i, n in enumerate(shape)]
    zeros = (0,) * len(shape)
    return (_tidy(digits, zeros, zeros),)


def joined(pieces: Iterable[Piece]) -> Pieces:
    # One more than the most tells that there are too many.
    return tuple(dict.fromkeys(pieces))[: MOST_PIECES + 1]


def moved(
    pieces: Pieces,
    to: Sequence[int | None],
    shape: Shape,
    loops: Mapping[int, int | None] = NO_LOOPS,
) -> Pieces:
    """After an operation that moves dimensions, sums over some and repeats along new.

    `to` says where each dimension goes, and `loops` where each loop does. Along
    dimensions of `shape` that none goes to, the array is the same everywhere.
    """
    places = {None: None, **dict(enumerate(to)), **loops}

    def of(piece: Piece) -> Piece:
        start = [0] * len(shape)
        for at, dim in zip(piece.start, to, strict=True):
            if dim is not None and dim >= 0:
                start[dim] = at
        digits = [Digit(d[0], places.get(d.dim, d.dim), *d[2:]) for d in piece.digits]
        reached = {*to, *(d.dim for d in digits if d.dim in loops.values())}
        new = [Digit(n, i, 1) for i, n in enumerate(shape) if i not in reached]
        return _tidy([*digits, *new], start, piece.offset)

    return joined(map(of, pieces))


def reshaped(pieces: Pieces, old: Shape, new: Shape) -> Pieces:
    """After a reshape: all is along one dimension first, which is then cut again."""
    if not math.prod(old):
        return ()
    # Counting by one along a dimension passes all dimensions after it.
    inner, outer = (
        [math.prod(shape[i + 1 :]) for i in range(len(shape))] for shape in (old, new)
    )
    pairs = zip(old, new, strict=False)
    alike = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    # Where no digits can say it, entries may be anywhere but along what stays.
    nowhere = [i if i < alike else None for i in range(len(old))]

    def cut(digit: Digit) -> list[Digit] | None:
        """A digit of the flat array as digits of the dimensions it goes through."""
        if digit.dim is None or digit.dim < 0:
            return [digit]
        step = digit.step * inner[digit.dim]
        parts, size, stride = [], digit.size, digit.stride
        for dim in reversed(range(len(new))):
            room = outer[dim] * new[dim]
            if size == 1 or step >= room:
                continue
            if step % outer[dim]:
                return None
            count = size
            if step * size > room:
                count, rest = divmod(room, step)
                if rest or size % count:
                    return None
            parts.append(Digit(count, dim, step // outer[dim], digit.axis, stride))
            size, step, stride = size // count, step * count, stride * count
        return parts if size == 1 else None

    def of(piece: Piece) -> Piece:
        flat = sum(at * n for at, n in zip(piece.start, inner, strict=True))
        start = [flat // n % size for n, size in zip(outer, new, strict=True)]
        parts = [cut(d) for d in piece.digits]
        digits = [d for of in parts for d in of or ()]
        found = Piece(tuple(digits), tuple(start), piece.offset)
        # Digits count separately: none carries from one dimension to the next.
        carries = any(found.span(i)[1] > n for i, n in enumerate(new))
        if None in parts or carries:
            return moved((piece,), nowhere, new)[0]
        return _tidy(*found)

    return joined(map(of, pieces))


def shifted(pieces: Pieces, low: Sequence[int]) -> Pieces:
    """Between zeros, `low` of them in front of each dimension."""
    starts = (tuple(map(sum, zip(p.start, low, strict=True))) for p in pieces)
    pairs = zip(pieces, starts, strict=True)
    return tuple(p._replace(start=start) for p, start in pairs)


def flipped(pieces: Pieces, dims: Sequence[int], shape: Shape) -> Pieces:
    """In the opposite order along some dimensions: their digits count down."""

    def of(piece: Piece) -> Piece:
        start, offset, digits = list(piece.start), list(piece.offset), []
        for d in piece.digits:
            if d.dim in dims and d.dim is not None:
                # From the other end of the digit, in the array and in the source.
                start[d.dim] += (d.size - 1) * d.step
                if d.axis is not None:
                    offset[d.axis] += (d.size - 1) * d.stride
                d = d._replace(stride=-d.stride)
            digits.append(d)
        start = [shape[i] - 1 - x if i in dims else x for i, x in enumerate(start)]
        return _tidy(digits, start, offset)

    return tuple(map(of, pieces))


def sliced(pieces: Pieces, dim: int, start: int, size: int) -> Pieces:
    """The entries from start on, `size` of them, along a dimension."""

    def inside(piece: Piece) -> list[Piece]:
        own = sorted((d for d in piece.digits if d.dim == dim), key=lambda d: -d.step)
        at, stop = piece.start[dim], start + size
        low = [-start if i == dim else 0 for i in range(len(piece.start))]
        if not own:
            return [*shifted((piece,), low)] if start <= at < stop else []
        # The major digit counts blocks of what the minor digits span: blocks that the
        # slice has as a whole stay one piece, those at its ends are sliced themselves.
        major, *minor = own
        others = [d for d in piece.digits if d.dim != dim]
        span = 1 + sum((d.size - 1) * d.step for d in minor)

        def blocks(first: int, count: int) -> Piece:
            """The piece with so many blocks of the major digit alone."""
            offset, begin = list(piece.offset), list(piece.start)
            begin[dim] += first * major.step
            if major.axis is not None:
                offset[major.axis] += first * major.stride
            return _tidy([*others, *minor, major._replace(size=count)], begin, offset)

        first = max(0, -((at - start) // major.step))
        last = min(major.size - 1, (stop - span - at) // major.step)
        found: list[Piece] = []
        if last >= first:
            found += shifted((blocks(first, last - first + 1),), low)
        for i in {first - 1, max(last + 1, first)} if minor else ():
            if 0 <= i < major.size:
                found += inside(blocks(i, 1))
        return found

    return joined(itertools.chain.from_iterable(map(inside, pieces)))


def _tidy(digits: Iterable[Digit], start: Sequence[int], offset: Sequence[int]):
    """The same relation in its only form: no idle digits, neighbors joined, sorted."""

    def key(d: Digit) -> tuple[Any, ...]:
        dim = 2 * PICKED if d.dim is None else d.dim
        axis = -1 if d.axis is None else d.axis
        return dim, axis, -abs(d.stride), -d.step, d.size

    kept: list[Digit] = []
    for d in sorted(digits, key=key):
        if d.size == 1 or (d.dim is None and d.axis is None):
            continue
        size = kept[-1].size if kept else 0
        if kept[-1:] == [(size, d.dim, d.step * d.size, d.axis, d.stride * d.size)]:
            kept[-1] = d._replace(size=size * d.size)
        elif d not in kept or d.dim is not None:
            kept.append(d)
    return Piece(tuple(kept), tuple(start), tuple(offset))

"""The layers of a product: a cell is one trip of the loops around it, and one head.

A loop over layers, or a stack that `vmap` goes through, makes one product of many
layers. Their parameters may be a stack, or separate arrays that the function puts
together. Cells of one class have the same parameters, and become one layer.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .fact import members, union
from .graph import Atom
from .heads_of_products import is_apart
from .marks import distinct, Marks, numbered, only_where, union_but, varied
from .numbers import Lead
from .scaling import Factor, Sum, Summand


class Trips(NamedTuple):
    """The loops of a layer whose trips have parameters of their own, outermost first.

    All their trips are counted as by nested Python loops.
    """

    loops: tuple[Lead, ...] = ()

    @property
    def number(self) -> int:
        return math.prod(x.size for x in self.loops)

    @property
    def all(self) -> int:
        """All trips, as bits."""
        return (1 << self.number) - 1

    def marks(self, atom: Atom) -> Marks:
        """Returns marks of an array, with a bit for every trip of the loops."""
        sizes = [x.size for x in self.loops]
        bits = numbered(1, 0, self.number, exact=True).reshape(sizes)
        here = {x.name: x.axis for x in atom.frame.lead}
        # An array outside of a loop is the same in all its trips.
        gone = tuple(i for i, x in enumerate(self.loops) if x.name not in here)
        bits = np.bitwise_or.reduce(bits, axis=gone) if gone else bits
        shape = [1] * atom.rank
        for x in self.loops:
            if x.name in here:
                shape[here[x.name]] = x.size
        return bits.reshape(shape)


class Cells(NamedTuple):
    """A class of cells: some trips with some heads, both as bits."""

    trips: int
    heads: int


class Rows(NamedTuple):
    """Where a leaf's entries for a class of cells are.

    - `stack`: axes along which each entry belongs to trips of its own, the outermost
        first.
    - `trips`: these trips, as bits, an array with the axes of the stack.
    - `marks`: for the rest of the axes, the heads of every entry.
    """

    stack: tuple[int, ...]
    trips: np.ndarray
    marks: Marks


class Entries(NamedTuple):
    """Entries of a parameter: the marks of their heads and of their trips."""

    heads: Marks
    trips: Marks

    @staticmethod
    def of(factor: Factor, cells: Cells) -> "Entries":
        """Returns a factor's entries in some cells."""
        heads, *trips = factor.all_marks
        heads = _bits(heads & cells.heads)
        by_trip = np.full((1,) * heads.ndim, 1, object)
        by_trip = _bits(trips[0] & cells.trips) if trips else by_trip
        return Entries(
            only_where(heads, by_trip != 0) if is_partial(by_trip) else heads,
            only_where(by_trip, heads != 0) if is_partial(heads) else by_trip,
        )

    def joined_with(self, other: "Entries") -> "Entries":
        return Entries(*(_bits(a | b) for a, b in zip(self, other, strict=True)))

    def meets(self, other: "Entries") -> bool:
        """Whether both have an entry in common."""
        return bool(np.any((self.heads != 0) & (other.heads != 0)))

    def disagrees_with(self, other: "Entries") -> bool:
        """Whether some entry belongs to other heads, or other trips, in both."""
        is_in = (self.heads != 0) & (other.heads != 0)
        pairs = zip(self, other, strict=True)
        return any(bool(np.any((a != b) & is_in)) for a, b in pairs)

    def rows(self, cells: Cells) -> Rows | None:
        """Returns the rows of a stack with one for each trip, or for several trips.

        Returns `None` if the entries are not such a stack: some rows are unused, some
        trips have no row, or their heads differ.
        """
        stack = varied(self.trips)
        rest = tuple(a for a in range(self.trips.ndim) if a not in stack)
        of_rows = np.asarray(union_but(self.trips, stack), object).squeeze(rest)
        sets = of_rows.ravel().tolist()
        is_whole = union(sets) == cells.trips and all(sets)
        if not is_whole or sum(x.bit_count() for x in sets) != cells.trips.bit_count():
            return None
        first = self.heads
        for axis in stack:
            first = first.take([0], axis)
        if np.any(first != self.heads):
            return None
        # The loop outside of another is the one with more trips between its entries.
        steps = {}
        for i, axis in enumerate(stack):
            one = [0] * len(stack)
            two = [_first(of_rows[(*one[:i], j, *one[i + 1 :])]) for j in (0, 1)]
            steps[axis] = abs(two[0] - two[1])
        order = sorted(range(len(stack)), key=lambda i: -steps[stack[i]])
        return Rows(
            tuple(stack[i] for i in order),
            of_rows.transpose(order),
            first.squeeze(tuple(stack)),
        )


def _bits(marks: Any) -> Marks:
    return np.asarray(marks, object)  # NumPy makes a number of an array without axes


def _first(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def is_partial(marks: Marks) -> bool:
    """Whether some entry has no mark."""
    return bool(np.any(marks == 0))


def agreed(leaf_rows: Sequence[Rows], cells: Cells) -> np.ndarray | None:
    """Returns the trips of each layer of a stack, or `None` if leaves disagree.

    A leaf may lack the last axes of the stack, along which layers share it.
    """
    none = np.empty((), object)
    none[()] = cells.trips
    deepest = max((x.trips for x in leaf_rows), key=np.ndim, default=none)
    for x in leaf_rows:
        depth = x.trips.ndim
        trips = np.bitwise_or.reduce(deepest, axis=tuple(range(depth, deepest.ndim)))
        if deepest.shape[:depth] != x.trips.shape or (trips != x.trips).any():
            return None
    return deepest


def trip_numbers(trips: np.ndarray) -> np.ndarray:
    """Returns the numbers of the trips of each layer, along one more axis.

    A layer with fewer trips than others repeats one.
    """
    of_rows = [members(x) for x in trips.ravel().tolist()]
    most = max(map(len, of_rows))
    whole = [x + x[:1] * (most - len(x)) for x in of_rows]
    return np.array(whole).reshape((*trips.shape, most))


def varied_loops(summands: Sum, loops: Sequence[Lead]) -> list[Lead]:
    """Returns the loops whose trips have entries of parameters of their own.

    A factor has marks of heads, then marks of each loop.
    """
    factors = [f for s in summands for f in s.factors]
    trips = [union(distinct(numbered(1, 0, x.size))) for x in loops]
    return [
        loop
        for i, (loop, bits) in enumerate(zip(loops, trips, strict=True), 1)
        if any(is_apart(f.all_marks[i], bits) for f in factors)
    ]


def classes_of(sums: Sequence[Sum], trips: Trips, heads: int) -> list[Cells]:
    """Returns the classes of cells that have the same summands.

    A factor has marks of heads, then marks of trips if there are loops.
    """
    columns = [_cells_of(s, trips, heads) for summands in sums for s in summands]
    groups: dict[tuple[int, ...], int] = {}
    for t, rows in enumerate(zip(*columns, strict=True) if columns else ()):
        groups[rows] = groups.get(rows, 0) | 1 << t
    trips_of: dict[Any, int] = {}
    for rows, same_trips in groups.items():
        for part in _divided((1 << heads) - 1, rows):
            key = part, tuple(bool(row & part) for row in rows)
            trips_of[key] = trips_of.get(key, 0) | same_trips
    return [Cells(same_trips, part) for (part, _), same_trips in trips_of.items()] or [
        Cells(trips.all, (1 << heads) - 1)
    ]


def _divided(heads: int, rows: Iterable[int]) -> Iterator[int]:
    """Yields the parts into which sets divide all heads."""
    parts = [heads]
    for row in {*rows}:
        parts = [x for part in parts for x in (part & row, part & ~row) if x]
    return iter(parts)


def _cells_of(summand: Summand, trips: Trips, heads: int) -> list[int]:
    """Returns for each trip the heads that a summand is in, as bits.

    A product is where all its factors are. After something nonlinear, such as a norm
    of kernels that are put together, it is where one of them is.
    """
    rows = [_cells_of_factor(f, trips) for f in summand.linear or summand.factors]
    if not rows:
        return [(1 << heads) - 1] * trips.number
    if summand.linear:
        columns = zip(*rows, strict=True)
        return [functools.reduce(operator.and_, column) for column in columns]
    return [union(column) for column in zip(*rows, strict=True)]


def _cells_of_factor(factor: Factor, trips: Trips) -> list[int]:
    heads, *of_trips = factor.all_marks
    if not of_trips:
        return [union(distinct(heads))] * trips.number
    heads_of: dict[int, int] = {}
    if any(a > 1 < b for a, b in zip(heads.shape, of_trips[0].shape, strict=True)):
        both = (x.ravel().tolist() for x in np.broadcast_arrays(of_trips[0], heads))
        for trip_mark, head_mark in {*zip(*both, strict=True)}:
            heads_of[trip_mark] = heads_of.get(trip_mark, 0) | head_mark
    else:
        heads_of = dict.fromkeys(distinct(of_trips[0]), union(distinct(heads)))
    rows = [0] * trips.number
    for trip_mark, head_mark in heads_of.items():
        for t in members(trip_mark) if head_mark else ():
            rows[t] |= head_mark
    return rows

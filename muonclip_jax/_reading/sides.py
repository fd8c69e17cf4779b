"""The sides of products of query and key, divided into layers.

The parameters of a side show which cells of its product are one layer, and which of
their entries a clip scales for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .cells import agreed, Cells, classes_of, Rows, Trips, varied_loops
from .fact import members
from .graph import Atom
from .heads_of_products import HeadMap
from .marks import Marks, numbered
from .numbers import Lead
from .parts import parts_in, PICKED, scaled_entries, ScaledEntries
from .scaling import IsLast, never, Sum
from .softmaxes import Softmaxes


# The most trips of loops over layers, and the longest dimension that is divided.
LONGEST = 1 << 14

BY_DATA = "data picks the parameters that would scale"


class Pair(NamedTuple):
    """The parts that scale query and key of a product; a side without any is empty."""

    query: list[ScaledEntries]
    key: list[ScaledEntries]
    whys: list[str]  # for each side, why nothing scales it

    def without(self, i: int, why: str) -> "Pair":
        """Returns the pair without the parts of one side."""
        whys = [why if j == i else x for j, x in enumerate(self.whys)]
        return Pair([] if i == 0 else self.query, [] if i == 1 else self.key, whys)

    def without_picks(self) -> "Pair":
        """Returns the pair without a side that data picks, if the other can do alone.

        Adapters, for example, are looked up for each example: no clip knows which.
        """
        sides = self.query, self.key
        picked = [any(part.why == PICKED for part in side) for side in sides]
        for i in (0, 1):
            if picked[i] and sides[1 - i] and not picked[1 - i]:
                return self.without(i, BY_DATA)
        return self


class Side(NamedTuple):
    """A side of a product, or a temperature, with the marks of its heads."""

    atom: Atom
    marks: Marks
    role: int  # 0 for query, 1 for key
    is_last: IsLast = never


class Sides(NamedTuple):
    """Query and key in one region of a product, or a temperature alone.

    `sums` has the summands of each side, with the marks of heads, and those of trips if
    the layer has loops.
    """

    sides: list[Side]
    heads: HeadMap
    sums: list[Sum]


class LayerCells(NamedTuple):
    """Cells that are one layer, with the pairs that scale it."""

    cells: Cells
    trips: np.ndarray  # for each layer of a stack, as bits
    pairs: list[Pair]
    makers: set[int]
    events: tuple[set[int], set[int]]  # of its queries and of its keys


class Divider:
    """Divides the cells of products into layers, and notes why that cannot be done."""

    def __init__(self, softmaxes: Softmaxes):
        self._scaling, self._frozen = softmaxes.scaling, softmaxes.frozen
        self.loops_of_heads: frozenset[Any] = frozenset()
        self.trips = Trips()
        self.refusals: list[str] = []

    def sum_of(self, side: Side, of_trips: Sequence[Marks] = ()) -> Sum:
        marks = (side.marks, *of_trips)
        return self._scaling.of(side.atom, marks, side.is_last)

    def _marked(self, sides: Sides) -> Sides:
        """Returns sides whose summands have marks of the trips of loops over layers."""
        sums = [self.sum_of(x, [self.trips.marks(x.atom)]) for x in sides.sides]
        return sides._replace(sums=sums)

    def divide(
        self, regions: Sequence[Sides], others: Sequence[Sides] = ()
    ) -> list[LayerCells]:
        """Divides the cells of products into layers, each with the pairs that scale it.

        Cells in which a clip would scale the same parameters are one layer, if these
        are a stack. If not, each trip is a layer, as in a Python loop. `others` have
        further summands that tell cells apart.
        """
        loops: dict[Any, Lead] = {}
        for x in (x for sides in (*regions, *others) for x in sides.sides):
            around = [y for y in x.atom.loops if y.name not in self.loops_of_heads]
            marks = [numbered(x.atom.rank, y.axis, y.size) for y in around]
            if around:
                varied = varied_loops(self.sum_of(x, marks), around)
                loops |= {y.name: y for y in varied}
        self.trips = trips = Trips(tuple(sorted(loops.values())))
        if trips.number > LONGEST:
            self.refusals.append(f"its loops have {trips.number} trips")
            self.trips = trips = Trips()
        if trips.loops:
            regions, others = ([self._marked(x) for x in y] for y in (regions, others))
        number = max(x.heads.number for x in regions)
        all_sums = [y for x in (*regions, *others) for y in x.sums]
        cell_classes = classes_of(all_sums, trips, number)
        # Summands that a clip does not scale make no difference.
        for i in (0, 1) if len(cell_classes) > 1 else ():
            groups: dict[Any, Cells] = {}
            for cells in cell_classes:
                sums = (y for x in regions for y in x.sums)
                parts = (parts_in(y, cells, self._frozen) for y in sums)
                key = cells[i], *(x.parameters for x in parts)
                old = groups.get(key, cells)
                groups[key] = Cells(old.trips | cells.trips, old.heads | cells.heads)
            cell_classes = list(groups.values())
        classes: list[LayerCells] = []
        for cells in cell_classes:
            if (layer := self._class(regions, cells)) is not None:
                classes.append(layer)
                continue
            for t in members(cells.trips):
                layer = self._class(regions, cells._replace(trips=1 << t))
                if layer is None:
                    why = "the layers of its loops cannot be distinguished"
                    self.refusals.append(why)
                else:
                    classes.append(layer)
        return sorted(classes, key=lambda x: [y & -y for y in x.cells])

    def _class(self, regions: Sequence[Sides], cells: Cells) -> LayerCells | None:
        """Returns the layer of some cells; `None` if its leaves are no stack."""
        pairs, rows = list[Pair](), list[Rows]()
        makers, events = set[int](), (set[int](), set[int]())
        for sides in regions:
            out, whys = [], []
            for side, summands in zip(sides.sides, sides.sums, strict=True):
                parts = parts_in(summands, cells, self._frozen)
                makers |= parts.makers
                events[side.role].update(parts.events)
                if parts.is_unsure:
                    self.refusals.append("a parameter's entries are in several heads")
                scaled = []
                for parameter, entries in (parts.scaled or {}).items():
                    if (leaf_rows := entries.rows(cells)) is None:
                        return None
                    rows.append(leaf_rows)
                    picked = parameter in parts.picked
                    scaled.append(scaled_entries(parameter, leaf_rows, cells, picked))
                out.append(None if parts.scaled is None else scaled)
                whys.append(parts.why)
            if [] in out:
                continue  # zeros contribute nothing
            query, key = (*out, None)[:2]
            pairs.append(Pair(query or [], key or [], whys).without_picks())
        trips = agreed(rows, cells)
        if trips is None:
            return None
        return LayerCells(cells, trips, pairs, makers, events)

"""The parts of query and key that a clip scales, in some cells of their product."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from .._model.owned_leaf import OwnedLeaf
from .cells import Cells, Entries, Rows
from .fact import union
from .heads_of_products import head_ids
from .marks import distinct, Marks
from .scaling import NORMED, Sum


PICKED = (
    "an index that is not a loop counter picks a layer of '{}' {}: use jax.lax.scan "
    "over the stack, or an index that counts 0, 1, ..."
)
UNEVEN = (
    "heads share entries of '{}' {} in groups of different sizes, or not all heads "
    "have entries there"
)
FROZEN = "what makes it is frozen, so that no parameter scales"


class ScaledEntries(NamedTuple):
    """Entries of a parameter in which logits are linear."""

    parameter: int
    leaf: OwnedLeaf  # which entries; `named_layers.py` adds the path
    why: str = ""  # why the layer of an entry is unknown, or empty

    def meets(self, other: "ScaledEntries") -> bool:
        """Whether both have an entry of one parameter in common."""
        is_same = self.parameter == other.parameter
        return is_same and not self.leaf.is_apart_from(other.leaf)

    def joined_with(self, other: "ScaledEntries") -> "ScaledEntries":
        """Returns the union: several products of the same entries scale them once."""
        if self.leaf.stack != other.leaf.stack:
            return other
        return self._replace(leaf=self.leaf.joined_with(other.leaf))


class Parts(NamedTuple):
    """The entries of parameters that scale a sum, in some cells."""

    scaled: dict[int, Entries] | None  # by parameter; `None` if no parameter scales it
    why: str  # if so, why
    makers: set[int]  # all parameters in the sum, also those before a norm
    events: set[int]
    picked: set[int]  # parameters from which an unknown index takes a part
    is_unsure: bool = False  # whether entries are in several heads

    @property
    def parameters(self) -> frozenset[int] | None:
        return None if self.scaled is None else frozenset(self.scaled)


def parts_in(summands: Sum, cells: Cells, frozen: Collection[int]) -> Parts:
    """Returns the parts of a side: one factor of each summand."""
    parts = Parts({}, "", set(), set(), set())
    scaled: dict[int, Entries] = {}
    number = cells.heads.bit_count()
    is_unsure, present = False, []
    for s in summands:
        pairs = [(f, Entries.of(f, cells)) for f in s.factors]
        linear = [x for x in pairs if x[0].is_linear]
        is_in = [bool(entries.heads.any()) for _, entries in linear or pairs]
        if not (all(is_in) if linear else any(is_in) or not is_in):
            continue  # the summand is in other cells
        parts.makers.update(f.parameter for f, x in pairs if x.heads.any())
        present.append((s, linear))
    for s, linear in present:
        trained = [x for x in linear if x[0].parameter not in frozen]
        if not trained:
            why = FROZEN if linear else s.why or NORMED
            return parts._replace(scaled=None, why=why)
        # The factor applied last comes first. Only a factor that distinguishes heads
        # can be scaled for each of them.
        counted = [(x, _groups(x[1].heads)) for x in trained]
        by_head = [x for x, n in counted if n == number > 1]
        by_head = by_head or [x for x, n in counted if n > 1]
        # Prefer entries that already scale another summand.
        reused = [
            (f, x)
            for f, x in by_head or trained
            if f.parameter in scaled and scaled[f.parameter].meets(x)
        ]
        factor, best = (reused or by_head or trained)[0]
        parts.events.add(factor.event)
        if factor.is_picked:
            parts.picked.add(factor.parameter)
        if old := scaled.get(factor.parameter):
            is_same = _groups(old.heads) == _groups(best.heads)
            is_unsure |= is_same and old.disagrees_with(best)
            best = old.joined_with(best)
        scaled[factor.parameter] = best
    return parts._replace(scaled=scaled, is_unsure=is_unsure)


def _groups(marks: Marks) -> int:
    """Returns how many heads, or groups of heads, have entries of their own."""
    groups = distinct(marks)
    is_apart = sum(m.bit_count() for m in groups) == union(groups).bit_count()
    return len(groups) if is_apart else 1


def scaled_entries(
    parameter: int, rows: Rows, cells: Cells, is_picked: bool
) -> ScaledEntries:
    numbers = head_ids(rows.marks, cells.heads)
    why = PICKED if is_picked else "" if numbers else UNEVEN
    ids, number = numbers or (np.zeros(rows.marks.shape, int), 1)
    return ScaledEntries(parameter, OwnedLeaf("", rows.stack, ids, number), why)

"""Finds kernels that activations scale or mix on their way to a product.

In StyleGAN 2, `x @ (kernel * style)` has another kernel for each example. Its weight is
an activation, as `style` is, but the parameter in it is used as without the style.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .graph import AllMarks, Atom, Eqn, Graph, Origin
from .marks import is_varied, numbered, union_along
from .primitives import Kind, moves


class Modulated(NamedTuple):
    """A kernel where an activation meets it: an operand, with marks of the weight."""

    eqn: Eqn
    i: int
    all_marks: AllMarks  # along the dimensions of `sides_of`
    is_mixed: bool = False  # by an activation that has neither side, as a router's

    @property
    def atom(self) -> Atom:
        return self.eqn.inputs()[self.i]


class _Lost(Exception):
    """The operand is no kernel."""


def sides_of(eqn: Eqn, i: int) -> tuple[list[int], list[int]]:
    """Returns the dimensions of a product's operand: summed over, and its alone."""
    atom, to = eqn.inputs()[i], eqn.to[i]
    # In a convolution, groups of examples may be in the axis of features.
    both = set() if eqn.name == "conv_general_dilated" else eqn.shared
    dims = [d for d, n in enumerate(atom.shape) if n > 1]
    over = [d for d in dims if to[d] is None]
    return over, [d for d in dims if to[d] is not None and to[d] not in both]


def _marks_of(eqn: Eqn, i: int) -> tuple[AllMarks, AllMarks]:
    """Returns marks along both sides of an operand."""
    atom, (over, free) = eqn.inputs()[i], sides_of(eqn, i)
    groups = eqn.jaxpr_eqn.params.get("feature_group_count", 1)
    if groups == 1:
        return atom.numbered(over), atom.numbered(free)
    # `vmap` makes groups of examples; these share the outputs of a kernel.
    pairs = [(d, atom.shape[d] // groups) for d in free]
    lines = [(d, np.tile(numbered(1, 0, n).ravel(), groups)) for d, n in pairs]
    return atom.numbered(over), tuple(atom.marked(d, line) for d, line in lines)


def modulated(graph: Graph, facts: Any, eqn: Eqn) -> tuple[int, list[Modulated]]:
    """Returns the operand that is a kernel times activations, and the kernels in it.

    The kernels have an axis that the product sums over and one that the other operand
    lacks; the activations that they meet do not have both. If any summand of the
    operand is not such a kernel, the list is empty.
    """
    is_conv = eqn.name == "conv_general_dilated"
    for i in (1,) if is_conv else (1, 0):
        if not facts.inputs(eqn)[i].is_deep or not all(sides_of(eqn, i)):
            continue
        try:
            if kernels := _kernels(graph, facts, eqn, i):
                return i, kernels
        except _Lost:
            pass
    return 0, []


def _kernels(graph: Graph, facts: Any, eqn: Eqn, i: int) -> list[Modulated]:
    atom, kernels = eqn.inputs()[i], []
    over, free = _marks_of(eqn, i)

    # Operands, and whether each has to have both sides. They are checked at the end.
    unchecked: list[tuple[Atom, AllMarks, bool]] = []

    def sides(all_marks: AllMarks, copies: Sequence[int] = ()) -> tuple[bool, bool]:
        """Whether entries differ along the sides of the weight."""
        varies = [is_varied(union_along(marks, copies)) for marks in all_marks]
        return any(varies[: len(over)]), any(varies[len(over) :])

    def sides_in(x: Atom, all_marks: AllMarks) -> tuple[bool, bool]:
        return sides(all_marks, [x.lead + d for d in graph.copied(x)])

    def has_both(x: Atom, all_marks: AllMarks) -> bool:
        # The second test is slow, since it looks for copies.
        return all(sides(all_marks)) and all(sides_in(x, all_marks))

    def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
        if (inner := origin.eqn) is None:
            if origin.atom is not None and origin.atom.is_zero:
                return []
            raise _Lost
        inputs, values = inner.inputs(), facts.inputs(inner)
        back = dict(moves(inner, origin.k))
        if inner.is_product:
            k = facts.weight_of(inner)
            # The softmax of a router mixes kernels.
            if k is None or not values[1 - k].weights:
                raise _Lost
        marks = {k: tuple(map(move, origin.all_marks)) for k, move in back.items()}
        if inner.is_product and (k := facts.weight_of(inner)) is not None:
            if not has_both(inputs[k], marks[k]):
                raise _Lost
            kernels.append(Modulated(inner, k, marks[k], is_mixed=True))
            return []
        is_scaled = inner.kind in (Kind.PRODUCT, Kind.QUOTIENT, Kind.CONTRACTION)
        is_row = inner.kind is Kind.PICKED and inner.name == "gather"  # of a table
        if not back or inner.kind.is_bent or is_row:
            raise _Lost
        if len(back) == 1 and values[min(back)].is_deep:
            return [(k, None) for k in back]
        if is_scaled:
            # Exactly one operand must have both sides, so one shows what the other has
            # to be. The other is checked at the end: most routes are lost before that.
            first = next((k for k in back if values[k].is_weight), max(back))
            is_first = has_both(inputs[first], marks[first])
            others = [k for k in back if k != first]
            unchecked.extend((inputs[k], marks[k], not is_first) for k in others)
            both = [first] if is_first else others
            if not both or (inner.kind is Kind.QUOTIENT and both != [0]):
                raise _Lost
        else:
            both = [k for k in back if has_both(inputs[k], marks[k])]
        followed: list[tuple[int, None]] = []
        for k in both:
            if values[k].is_weight:
                is_mixed = inner.kind is Kind.PRODUCT and not any(
                    sides_in(inputs[1 - k], marks[1 - k])
                )
                kernels.append(Modulated(inner, k, marks[k], is_mixed))
            elif values[k].is_deep:
                followed.append((k, None))
            else:
                raise _Lost
        return followed

    graph.back(atom, (*over, *free), ahead)
    if kernels and any(has_both(x, marks) != is_one for x, marks, is_one in unchecked):
        raise _Lost
    return kernels

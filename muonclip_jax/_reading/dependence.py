"""Finds the entries of parameters that an array depends on, linearly or not.

A clip scales entries in which the logits are linear. It works only if the logits do not
depend on the same entries in a second way, such as through a gate. Facts hold for whole
parameters, but query and key may share a fused kernel, so marks go back to entries.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .fact import Fact, members
from .facts import Facts, is_inexact
from .graph import AllMarks, Atom, Eqn, Graph, Origin
from .marks import Marks
from .primitives import Kind, moves


class Dependency(NamedTuple):
    """Entries of a parameter that an array depends on."""

    parameter: int
    marks: Marks  # of the parameter
    event: int  # where they meet an activation; 0 if they meet none
    line: str  # where this route meets others, or a primitive without a rule; else ""


class Dependence:
    """Follows arrays back to all their parameters within a layer."""

    def __init__(self, graph: Graph, facts: Facts, attention: int):
        self._graph, self._facts = graph, facts
        # Products whose attention weights end the search: they feed later layers.
        self._attention = attention

    def uses(
        self, atom: Atom, events: int, parameters: int, is_side: bool
    ) -> Iterator[Dependency]:
        """Yields an array's uses of parameters that meet activations at some events.

        The search ends at the output of earlier attention, the input of a layer. If
        `is_side` (the array is a query or a key), it ends there only where a kernel
        follows: without one, as where retrieved patterns are queries again, the logits
        of both are one layer's.
        """
        graph, facts = self._graph, self._facts
        meetings: list[tuple[Atom, AllMarks, int, str]] = []
        lost: list[tuple[Eqn, str]] = []

        def ahead(origin: Origin, carried: Any) -> list[tuple[int, Any]]:
            if (eqn := origin.eqn) is None:
                return []
            line, stops = carried
            # After a kernel the search stops at earlier attention.
            stops |= eqn.is_product and facts.weight_of(eqn) is not None
            inputs, back = eqn.inputs(), dict(moves(eqn, origin.k))
            if not back and is_inexact(eqn.output(origin.k)):
                lost.append((eqn, line or eqn.line))
            weights, activations = [], []
            for i, fact in enumerate(facts.inputs(eqn)):
                if i not in back or (stops and self._is_of_attention(eqn, fact)):
                    continue
                if fact.is_weight and fact.leaves & parameters:
                    weights.append(i)
                elif not fact.is_weight and fact.events & events:
                    activations.append(i)
            if len(weights) + len(activations) > 1 or not activations:
                line = line or eqn.line
            for i in weights:
                all_marks = tuple(map(back[i], origin.all_marks))
                meetings.append((inputs[i], all_marks, facts.event(eqn), line))
            return [(i, (line, stops)) for i in activations]

        if facts.of(atom).is_weight:
            meetings.append((atom, atom.whole, 0, ""))
        else:
            graph.back(atom, atom.whole, ahead, ("", not is_side))
        for weight, all_marks, event, line in meetings:
            if event & events or not event:
                for parameter, marks in self._entries(weight, all_marks):
                    yield Dependency(parameter, marks, event, line)
        for eqn, line in lost:  # it has no rule, so it may depend on any entry
            upstream = facts.of(eqn.output()).events & events
            for parameter in members(parameters):
                if event := upstream & facts.meetings(parameter):
                    yield Dependency(parameter, np.ones((), int), event, line)

    def _entries(self, weight: Atom, marks: AllMarks) -> Iterator[tuple[int, Marks]]:
        for origin in self._graph.walk(weight, marks):
            if origin.parameter is not None:
                yield origin.parameter, origin.all_marks[0]

    def _is_of_attention(self, eqn: Eqn, fact: Fact) -> bool:
        seen = fact.weights | fact.mixed | fact.sums | fact.normalized
        seen |= fact.products if eqn.kind is Kind.EXTREME else 0
        return bool(seen & self._attention)

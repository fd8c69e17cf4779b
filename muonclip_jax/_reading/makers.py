"""Finds the kernels that made an activation, and the dimensions of their outputs."""

from collections.abc import Iterator
from typing import NamedTuple

from .graph import AllMarks, Atom, Eqn, Origin
from .marks import is_varied, Marks, moved, small, union_along
from .softmaxes import Softmaxes


class Maker(NamedTuple):
    """A parameter in the weight of a product that made an activation."""

    eqn: Eqn
    parameter: int
    all_marks: AllMarks  # of the parameter


class Makers:
    """Follows activations back to the nearest products with weights."""

    def __init__(self, softmaxes: Softmaxes):
        self._graph, self._facts = softmaxes.graph, softmaxes.facts
        self._scaling = softmaxes.scaling
        self._outputs: dict[tuple[Atom, int], bool] = {}

    def of(self, atom: Atom, all_marks: AllMarks) -> Iterator[Maker]:
        """Yields the parameters of the nearest products with weights."""
        products: list[tuple[Eqn, int, AllMarks]] = []

        def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
            if (eqn := origin.eqn) is None:
                return []
            facts = self._facts.inputs(eqn)
            if eqn.is_product:
                i = self._facts.weight_of(eqn)
                if i is not None:
                    if facts[i].leaves and not facts[1 - i].is_onehot:
                        products.append((eqn, i, origin.all_marks))
                    return []
                if eqn.contracted and all(f.is_deep for f in facts):
                    return []
            return [(i, None) for i, fact in enumerate(facts) if fact.is_deep]

        self._graph.back(atom, all_marks, ahead)
        for eqn, i, all_marks in products:
            weight = eqn.inputs()[i]
            marks = tuple(small(moved(x, weight.lead, eqn.to[i])) for x in all_marks)
            for summand in self._scaling.of(weight, marks):
                for f in summand.factors:
                    yield Maker(eqn, f.parameter, f.all_marks)

    def outputs(self, atom: Atom) -> dict[int, list[int]]:
        """Returns the dimensions of each kernel's outputs."""
        outputs: dict[int, list[int]] = {}
        for _, parameter, all_marks in self.of(atom, atom.each()):
            dims = outputs.setdefault(parameter, [])
            varied = (d for d, x in enumerate(all_marks) if is_varied(x))
            dims += [d for d in varied if d not in dims]
        return outputs

    def is_output(self, atom: Atom, d: int) -> bool:
        """Returns whether a dimension holds kernel outputs, or columns of a table.

        A product of two activations keeps the outputs along its free dimensions.
        """
        if (atom, d) not in self._outputs:
            arrived: list[Marks] = []

            def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
                (marks,) = origin.all_marks
                if (eqn := origin.eqn) is None or not is_varied(marks):
                    arrived.extend([marks] if origin.parameter is not None else [])
                    return []
                facts = self._facts.inputs(eqn)
                i = self._facts.weight_of(eqn) if eqn.is_product else None
                if i is not None and facts[i].leaves:
                    weight = eqn.inputs()[i]
                    # An axis of experts, or of a stack, holds no outputs; nor do the
                    # trips of a loop or devices, over which experts may be spread.
                    outputs = [None if o in eqn.shared else o for o in eqn.to[i]]
                    marks, lead = moved(marks, weight.lead, outputs), range(weight.lead)
                    arrived.append(union_along(marks, lead))
                    return []
                # Gains and biases are no outputs. If no operand is an activation, a
                # parameter makes one from data: follow it.
                deep = [(j, None) for j, f in enumerate(facts) if f.is_deep]
                return deep or [(j, None) for j, f in enumerate(facts) if f.leaves]

            self._graph.back(atom, atom.numbered([d]), ahead)
            self._outputs[atom, d] = any(map(is_varied, arrived))
        return self._outputs[atom, d]

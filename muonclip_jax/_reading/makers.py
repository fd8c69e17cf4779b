"""Which kernels made an activation, and along which of its dimensions."""

from collections.abc import Iterator
from typing import NamedTuple

from .facts import Facts
from .graph import Atom, Eqn, Graph, Labels, Origin
from .labels import moved, small, varied
from .scaling import Scaling


class Kernel(NamedTuple):
    """A product with a weight, which made an activation."""

    at: Eqn
    i: int  # which operand the weight is
    labels: Labels  # of its result


class Makers:
    """Follows activations back to the nearest products with weights."""

    def __init__(self, graph: Graph, facts: Facts, scaling: Scaling):
        self._graph, self._facts, self._scaling = graph, facts, scaling

    def kernels(self, atom: Atom, labels: Labels) -> list[Kernel]:
        """The nearest products with weights that an activation comes from."""
        found: list[Kernel] = []

        def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
            if (at := origin.at) is None:
                return []
            facts = self._facts.inputs(at)
            if at.is_product:
                i = self._facts.weight_of(at)
                if i is not None:
                    if facts[i].leaves and not facts[1 - i].is_onehot:
                        found.append(Kernel(at, i, origin.labels))
                    return []
                if at.contracted and all(f.is_deep for f in facts):
                    return []
            return [(i, None) for i, fact in enumerate(facts) if fact.is_deep]

        self._graph.back(atom, labels, ahead)
        return found

    def leaves(self, kernel: Kernel) -> Iterator[tuple[int, Labels]]:
        """The parameters of a kernel's weight, with the labels of its outputs."""
        at, i, labels = kernel
        own = tuple(small(moved(x, len(at.frame.lead), at.to[i])) for x in labels)
        for summand in self._scaling.of(at.inputs()[i], own):
            for f in summand.factors:
                yield f.parameter, f.labels

    def outputs(self, atom: Atom) -> dict[int, list[int]]:
        """The dimensions that distinguish the outputs of each kernel, in its order."""
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for kernel in self.kernels(atom, atom.each()):
            for number, labels in self.leaves(kernel):
                for d, label in enumerate(labels):
                    for axis in varied(label):
                        # Major ones change less often along an axis.
                        line = label.swapaxes(0, axis).reshape(label.shape[axis], -1)
                        changes = int((line[1:] != line[:-1]).any(1).sum())
                        found.setdefault(number, {}).setdefault(d, (axis, changes))
        return {
            number: sorted(dims, key=dims.__getitem__) for number, dims in found.items()
        }

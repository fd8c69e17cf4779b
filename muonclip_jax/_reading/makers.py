"""Which kernels made an activation, and along which of its dimensions."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from .facts import Facts
from .graph import Atom, Eqn, Graph, Labels
from .labels import is_varied, key_of, moved, small
from .primitives import contracted, moves, PRODUCTS, sides
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

    def kernels(self, atom: Atom, labels: Labels) -> Iterator[Kernel]:
        """The nearest products with weights that an activation comes from."""
        known: set[Any] = set()
        # No recursion: a residual stream goes through all layers.
        ahead = [(atom, labels)] if labels else []
        while ahead:
            for origin, _ in self._graph.origins(*ahead.pop()):
                at = origin.at
                if at is None:
                    continue
                key = at.key(), tuple(map(key_of, origin.labels))
                if key in known:
                    continue
                known.add(key)
                facts = self._facts.all_of(at.inputs())
                if at.name in PRODUCTS and not self._facts.is_entrywise(at):
                    i = self._facts.weight_of(at)
                    if i is not None:
                        if facts[i].leaves and not facts[1 - i].is_onehot:
                            yield Kernel(at, i, origin.labels)
                        continue
                    if contracted(at.eqn) and all(f.is_deep for f in facts):
                        continue
                for i, move in moves(at, origin.k):
                    if facts[i].is_deep:
                        own = tuple(map(move, origin.labels))
                        ahead.append((at.inputs()[i], own))

    def leaves(self, kernel: Kernel) -> Iterator[tuple[int, Labels]]:
        """The parameters of a kernel's weight, with the labels of its outputs."""
        at, i, labels = kernel
        to = sides(at.eqn)
        if to is None:
            return
        lead = len(at.frame.lead)
        own = tuple(small(moved(x, lead, to[i])) for x in labels)
        for summand in self._scaling.of(at.inputs()[i], own):
            for f in summand.factors:
                yield f.parameter, f.labels

    def outputs(self, atom: Atom) -> dict[int, list[int]]:
        """The dimensions that tell the outputs of each kernel apart, in its order."""
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for kernel in self.kernels(atom, atom.each()):
            for number, labels in self.leaves(kernel):
                for d, label in enumerate(labels):
                    for axis in range(label.ndim):
                        if is_varied(label, axis):
                            # Major ones change less often along an axis.
                            line = label.swapaxes(0, axis).reshape(
                                label.shape[axis], -1
                            )
                            changes = int((line[1:] != line[:-1]).any(1).sum())
                            found.setdefault(number, {}).setdefault(d, (axis, changes))
        return {
            number: sorted(dims, key=dims.__getitem__) for number, dims in found.items()
        }

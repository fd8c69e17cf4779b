"""Routers: kernels whose outputs decide where other activations go."""

from collections.abc import Iterator

import numpy as np

from .fact import Fact, members, union
from .graph import Atom, Eqn, Origin
from .makers import Makers
from .marks import is_varied, Marks, varied
from .modulated import sides_of
from .primitives import Kind, moves
from .softmaxes import Softmaxes


# Kinds that put activations somewhere by an order or by places.
_PLACES = (Kind.ORDER, Kind.WINNER, Kind.PLACED, Kind.SCATTERED)

#: Kinds in which two activations may meet as factors.
MULTIPLIES = (Kind.PRODUCT, Kind.CONTRACTION)


class Routers:
    """The routers of a graph, noted one equation after another.

    A router's softmax weighs other activations, or its outputs are put in order and say
    which entries are taken.
    """

    def __init__(self, softmaxes: Softmaxes, makers: Makers):
        self._softmaxes, self._makers = softmaxes, makers
        self._facts, self._graph = softmaxes.facts, softmaxes.graph
        self.chosen = 0  # events whose outputs decide where activations go
        self._kept = 0  # events of keys, whose outputs linear attention keeps
        # Events whose outputs a weight takes as features, though an order cuts them.
        self._cut_features = 0

    @property
    def events(self) -> int:
        """The events of all routers, once every equation was noted."""
        return self.chosen & ~self._cut_features & ~self._kept

    def choose(self, atom: Atom, fact: Fact) -> None:
        """Notes a kernel whose outputs decide an order, as a router's do.

        In the array, each entry is a different output of a router. Distances to the
        codes of a vector quantizer are sums over all outputs, and logits of heads are
        sums over some, so no kernel before them is a router.
        """
        makers = self._makers.of(atom, atom.each()) if fact.writers else ()
        for eqn, _, all_marks in makers:
            lines = (x.ravel().tolist() for x in np.broadcast_arrays(*all_marks))
            entries = [x for x in zip(*lines, strict=True) if any(x)]
            if any(map(is_varied, all_marks)) and len({*entries}) == len(entries):
                self.chosen |= self._facts.event(eqn) & fact.writers

    def note(self, eqn: Eqn, facts: list[Fact]) -> None:
        """Notes routers whose softmax weighs other activations."""
        for i, (mine, other) in enumerate((facts[:2], facts[1::-1])):
            if not (mine.is_deep and other.is_deep and mine.weights | self.chosen):
                continue
            # A weight for each entry gates features and mixes nothing.
            if eqn.kind is Kind.PRODUCT and not self._softmaxes.is_repeated(eqn, i):
                continue
            states = self._state(eqn, 1 - i)
            # A key is no router: its softmax was seen where the key met a value.
            for product in states:
                for fact in self._facts.inputs(product):
                    for router in self.of(fact.weights):
                        self._kept |= self._facts.event(router)
            for router in self.of(mine.weights & ~other.weights):
                if not states:
                    self.chosen |= self._facts.event(router) & ~other.events

    def _state(self, eqn: Eqn, i: int) -> list[Eqn]:
        """Returns the equations that made a state that linear attention keeps.

        The state has the key's features along the dimensions that the product sums
        over, and the value's along the rest. A product of key and value made it, after
        all products with weights. In outputs of experts, one array has both.
        """
        atom, dims = eqn.inputs()[i], range(len(eqn.inputs()[i].shape))
        if eqn.kind is Kind.PRODUCT:  # a sum follows the product
            axes, others = (self._varied(x) for x in (atom, eqn.inputs()[1 - i]))
            over = [a - atom.lead for a in axes & others]
            rest = [a - atom.lead for a in axes - others]
        else:
            over = [pair[i] for pair in eqn.contracted]
            rest = [d for d in dims if d not in over and eqn.to[i][d] not in eqn.shared]
        products: list[Eqn] = []

        def is_output(array: Atom, marks: Marks) -> bool:
            """Whether marks are along outputs of a kernel, as a key's features are.

            A norm is a product that repeats one operand, too, but along features.
            """
            dims = (axis - array.lead for axis in varied(marks))
            return any(d >= 0 and self._makers.is_output(array, d) for d in dims)

        def ahead(origin: Origin, _: None) -> Iterator[tuple[int, None]]:
            if (inner := origin.eqn) is None:
                return
            facts = self._facts.inputs(inner)
            if inner.is_product and self._facts.weight_of(inner) is not None:
                return
            deep = [(j, f) for j, f in moves(inner, origin.k) if facts[j].is_deep]
            if inner.kind in MULTIPLIES and len(deep) == 2:
                sides = [[is_varied(f(x)) for x in origin.all_marks] for _, f in deep]
                pairs = [*zip(*sides, strict=True)]
                of_rest = {*pairs[len(over) :]}
                keys = zip(origin.all_marks, pairs[: len(over)], strict=False)
                products.extend(
                    inner
                    for marks, (a, b) in keys
                    if (a != b and (b, a) in of_rest)
                    and is_output(inner.inputs()[deep[b][0]], deep[b][1](marks))
                )
            yield from ((j, None) for j, _ in deep)

        self._graph.back(atom, atom.numbered([*over, *rest]), ahead)
        return products

    def note_mixers(self, fact: Fact) -> int:
        """Notes the routers whose weights an activation is; returns their events."""
        routers = (self._facts.event(eqn) for eqn in self.of(fact.weights))
        mixers = union(routers) | fact.writers & self.chosen
        self.chosen |= mixers
        return mixers

    def keep_features(self, eqn: Eqn, i: int, atom: Atom, other: Fact) -> None:
        """Notes kernels whose outputs are cut by their order and go to a weight.

        A router decides where other activations go. In a layer of k winners, a weight
        is contracted with the outputs themselves: they alone are in its operand, or
        they are along the axis that is summed over.
        """
        if not self.chosen & other.past or other.weights:
            return
        over, _ = sides_of(eqn, 1 - i)
        if len(over) > 1 and eqn.name == "dot_general":  # experts and their inputs
            weighed = self.dims_of(atom)
            over = [d for d in over if d not in weighed]
        chosen_kernels = union(self._facts.kernels_of(x) for x in members(self.chosen))

        def follow(inner: Eqn, k: int) -> list[int]:
            facts = [] if inner.is_product else self._facts.inputs(inner)
            return [j for j, x in enumerate(facts) if x.is_deep]

        # Sorting outputs, or putting them back, loses their marks. They count there if
        # only kernels of chosen events can have made them.
        for origin in self._graph.walk(atom, atom.numbered(over), follow):
            if (placing := origin.eqn) and placing.kind in _PLACES:
                fact = self._facts.of(placing.output(origin.k))
                is_alone = fact.kernels > 0 and not fact.kernels & ~chosen_kernels
                if is_alone and self._is_lost(origin, placing):
                    self._cut_features |= fact.writers
        for product, _, all_marks in self._makers.of(atom, atom.numbered(over)):
            if any(map(is_varied, all_marks)):
                self._cut_features |= self._facts.event(product)
        self.chosen &= ~self._cut_features

    def _is_lost(self, origin: Origin, eqn: Eqn) -> bool:
        """Whether marks end at an equation.

        Tokens get places among an expert's inputs, but their features stay in order.
        """
        facts = self._facts.inputs(eqn)
        back = [move for i, move in moves(eqn, origin.k) if facts[i] != Fact()]
        return any(
            is_varied(marks) and not any(is_varied(move(marks)) for move in back)
            for marks in origin.all_marks
        )

    def of(self, bits: int) -> list[Eqn]:
        """Returns the products with a weight over whose outputs a softmax is taken."""
        routers = []
        for bit in (1 << k for k in members(bits)):
            eqn = self._facts.products[bit]
            is_product = eqn.kind is Kind.CONTRACTION
            i = self._facts.weight_of(eqn) if is_product else None
            if i is None or not self._facts.event(eqn):
                continue
            others = eqn.to[1 - i]
            free = {d for d in eqn.to[i] if d is not None and d not in others}
            lead = len(eqn.frame.lead)
            for summed, (atom, axes) in self._softmaxes.sums:
                if not summed & bit:
                    continue
                all_marks, _ = self._softmaxes.to_product(
                    atom, atom.numbered(axes), bit
                )
                if any(x.shape[lead + d] > 1 for x in all_marks or () for d in free):
                    routers.append(eqn)
                    break
        return routers

    def _varied(self, atom: Atom) -> set[int]:
        """Returns the axes of an array's marks along which it may be no copy."""
        same = self._graph.copied(atom)
        dims = (d for d, n in enumerate(atom.shape) if n > 1 and d not in same)
        return {atom.lead + d for d in dims}

    def dims_of(self, atom: Atom) -> set[int]:
        """Returns the dimensions along which a router's weights for an array vary.

        Its weights are a softmax over its outputs, its choice, or one-hot rows.
        """
        dims: set[int] = set()

        def ahead(origin: Origin, _: None) -> Iterator[tuple[int, None]]:
            eqn = origin.eqn
            if eqn is None or eqn.contracted:
                return
            facts, is_product = self._facts.inputs(eqn), eqn.kind in MULTIPLIES
            # Both operands may depend on a router. The gate is then the one that varies
            # along fewer dimensions, or the one-hot one.
            varied = [self._varied(x) if is_product else set() for x in eqn.inputs()]
            routed = [f.is_onehot or f.events & self.chosen for f in facts]
            rank = [len(n) - f.is_onehot for n, f in zip(varied, facts, strict=True)]
            for i, move in moves(eqn, origin.k):
                others = [j for j, f in enumerate(facts) if i != j and f != Fact()]
                is_least = all(rank[i] < rank[j] or not routed[j] for j in others)
                is_gate = (routed[i] and is_least) or self.of(facts[i].weights)
                if is_product and others and is_gate:
                    for d, marks in enumerate(map(move, origin.all_marks)):
                        if any(marks.shape[a] > 1 for a in varied[i]):
                            dims.add(d)
                elif facts[i].is_deep:
                    yield i, None

        self._graph.back(atom, atom.each(), ahead)
        return dims

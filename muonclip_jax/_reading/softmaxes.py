"""Finds attention: products that are normalized and then weigh activations.

A product of query and key becomes weights when its exponential is divided by a sum of
such exponentials. From there, marks are followed back to the product. `suspicion`
names the attention that has another form.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .back import shared
from .fact import Fact, members, union
from .facts import Facts, is_inexact
from .graph import AllMarks, Atom, Eqn, Graph, Origin
from .marks import is_varied, Marks, marks_along, moved, small, union_of
from .primitives import Kind, moves
from .scaling import Scaling


#: Kinds that can divide by a sum: `x / sum`, `sum**-1`, `exp(x - log(sum))`.
_DIVIDES = (Kind.QUOTIENT, Kind.POWER, Kind.EXPONENTIAL)


#: Kinds through which a sum goes before it divides.
_IN_DIVISORS = (
    *(Kind.SAME, Kind.REPEATED, Kind.PERMUTED, Kind.CUT, Kind.PICKED, Kind.JOINED),
    *(Kind.CHOICE, Kind.STOPPED, Kind.LINEAR, Kind.SUM, Kind.LARGER, Kind.TOTAL),
    *(Kind.EXCHANGED, Kind.SCATTERED, Kind.PLACED),
)


class Product(NamedTuple):
    """A product of query and key, as it enters a softmax."""

    eqn: Eqn
    keys: frozenset[int]  # the axes of its marks along which the softmax sums
    # For each operand, the product's dimension that each operand dimension becomes.
    to: list[list[int | None]]
    over: list[tuple[int, int]]  # pairs of operand dimensions that it sums over
    # For each operand, the axes of the marks that it alone has.
    free: tuple[frozenset[int], frozenset[int]]

    @property
    def lead(self) -> int:
        return self.eqn.output().lead

    @property
    def sizes(self) -> dict[int, int]:
        """Returns the size of each axis of its marks."""
        sizes = *(x.size for x in self.eqn.frame.lead), *self.eqn.output().shape
        return dict(enumerate(sizes))

    @property
    def is_key(self) -> list[bool]:
        """Returns for each operand whether it alone has the axes of the softmax."""
        return [bool(self.keys) and self.keys <= x for x in self.free]

    def operand(self, i: int) -> Atom:
        return self.eqn.inputs()[i]

    def side(self, i: int, marks: Marks) -> Marks:
        """Returns the marks of an operand from the marks of the product."""
        return small(moved(marks, self.lead, self.to[i]))

    def over_of(self, i: int) -> AllMarks:
        """Returns marks along the dimensions of an operand that are summed over."""
        atom, dims = self.operand(i), [pair[i] for pair in self.over]
        return atom.numbered(d for d in dims if atom.shape[d] > 1)


@dataclasses.dataclass
class Route:
    """The equations between a product and an array that was computed from it."""

    eqns: list[Eqn] = dataclasses.field(default_factory=list)  # all of them
    # Multiplications and divisions, the index of the factor, and the result's marks.
    factors: list[tuple[Eqn, int, AllMarks]] = dataclasses.field(default_factory=list)
    # Sums, and the index of the operand that the product has no part in.
    added: list[tuple[Eqn, int]] = dataclasses.field(default_factory=list)
    nonlinear: list[Eqn] = dataclasses.field(default_factory=list)
    joins: list[Eqn] = dataclasses.field(default_factory=list)


#: An array, and the axes along which it is summed.
Over = tuple[Atom, tuple[int, ...]]

#: An equation in which weights meet activations, and the index of the weights.
Meeting = tuple[Eqn, int]


class Softmax(NamedTuple):
    """Products that are normalized together."""

    bits: int
    exps: list[Eqn]
    sums: list[Over]  # by which it divides; none if they are hidden
    over: list[Over]  # what shows the axes of the keys
    meetings: list[Meeting]


def exponent(eqn: Eqn) -> int | None:
    """Returns the index of the exponent, or `None` for other equations."""
    if eqn.kind is not Kind.EXPONENTIAL:
        return None
    is_known = eqn.name != "pow" or isinstance(eqn.inputs()[0].number, int | float)
    return len(eqn.inputs()) - 1 if is_known else None


def _is_bent(eqn: Eqn) -> bool:
    """Returns whether logits lose their size in an equation."""
    is_square = eqn.kind in (Kind.PRODUCT, Kind.QUOTIENT)
    return is_square or (eqn.kind.is_bent and exponent(eqn) is None)


def _summed(eqn: Eqn, facts: Sequence[Fact]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the operands whose entries an equation sums, and along which axes."""
    if eqn.kind is Kind.TOTAL:
        yield 0, eqn.axes
    elif eqn.kind is Kind.SCATTERED:  # over edges of a graph
        kept = eqn.jaxpr_eqn.params["dimension_numbers"].update_window_dims
        yield -1, tuple(d for d in range(len(eqn.inputs()[-1].shape)) if d not in kept)
    elif eqn.contracted:  # with ones, or a mask
        for i in (0, 1):
            if not facts[1 - i].leaves:
                yield i, tuple(pair[i] for pair in eqn.contracted)


def dimensions_in(marks: Marks, eqn: Eqn) -> set[int]:
    """Returns the dimensions of an equation's result along which marks vary."""
    lead = len(eqn.frame.lead)
    lines = [marks_along(marks, lead + d) for d in range(len(eqn.output().shape))]
    # A slice that leaves zeros around equal marks does not count.
    is_in = [len(x) > 1 and (is_varied(x) or bool(x.all())) for x in lines]
    return {d for d, x in enumerate(is_in) if x}


class Softmaxes:
    """Finds all attention of a graph."""

    def __init__(self, graph: Graph, facts: Facts):
        self.graph, self.facts = graph, facts
        self.scaling = Scaling(graph, facts)
        self.equations = list(graph.top.equations())
        # The sums by which softmaxes may divide, with the bits of their products.
        self.sums = list(self._sums())
        self.summed = union(bits for bits, _ in self.sums)
        self.frozen = self._frozen()

    def _frozen(self) -> set[int]:
        """Returns the parameters that no gradient reaches, which count as data.

        Results without a gradient, such as tokens that a function generates, do not
        show which parameters are trained; but one integer is a metric next to the loss.
        """
        facts, outputs = self.facts, self.facts.outputs
        tops = zip(self.graph.top.outputs, outputs, strict=False)
        tokens = (
            x.unstopped for atom, x in tops if atom.shape and not is_inexact(atom)
        )
        trained = facts.sloped | union(x.trained for x in outputs) | union(tokens)
        leaves = union(x.leaves for x in outputs)
        if not trained:
            return {*members(leaves & ~union(x.unstopped for x in outputs))}
        return {*members((leaves | facts.choosing) & ~trained)}

    def _sums(self) -> Iterator[tuple[int, Over]]:
        """Yields products with the arrays and axes that sum their exponentials."""
        for eqn in self.equations:
            if eqn.kind is Kind.SUM:  # piece by piece, or key by key
                one, two = (x.lone_exponentials for x in self.facts.inputs(eqn))
                if one and two:
                    yield one | two, (eqn.inputs()[0], ())
            if eqn.kind is Kind.LOG_TOTAL:
                (logits,) = eqn.inputs()
                if bits := self.facts.of(logits).products:
                    yield bits, (logits, eqn.axes)
            for i, axes in _summed(eqn, self.facts.inputs(eqn)):
                if bits := self.facts.inputs(eqn)[i].unnormalized:
                    yield bits, (eqn.inputs()[i], axes)

    def all(self) -> Iterator[Softmax]:
        """Yields the groups of products that are normalized and weigh activations."""
        weighed: list[tuple[int, Meeting]] = []
        exps: dict[int, list[Eqn]] = {}
        for eqn in self.equations:
            if eqn.inside:
                continue
            facts = self.facts.inputs(eqn)
            if (i := exponent(eqn)) is not None and facts[i].products:
                exps.setdefault(facts[i].products, []).append(eqn)
            elif eqn.kind in (Kind.CONTRACTION, Kind.PRODUCT):
                weighed += self._weighs(eqn, facts)
        seen = 0
        for bits, group in self._together(exps):
            meetings = [x for b, x in weighed if b & bits]
            if meetings and bits & ~seen:
                seen |= bits
                # The sum may be hidden, for example in a column of ones of the values.
                # The softmax then sums along the axes along which it weighs values.
                sums = [x for b, x in self.sums if b & bits]
                if not sums and not any(self.divides(eqn) for eqn, _ in meetings):
                    continue  # nothing normalizes these exponentials
                over = [x for x in sums if x[1]] or [self._over(*x) for x in meetings]
                yield Softmax(bits, group, sums, over, meetings)

    def divides(self, eqn: Eqn) -> bool:
        """Returns whether something is divided by entries of a result, or by their sum.

        The values may have a column of ones, whose entry in the result is the sum by
        which a softmax divides.
        """
        return eqn in self._divisors

    @functools.cached_property
    def _divisors(self) -> set[Eqn]:
        """The equations whose entries, or sums of these, divide something."""

        def follow(eqn: Eqn, k: int) -> Iterable[int]:
            return range(len(eqn.inputs())) if eqn.kind in _IN_DIVISORS else ()

        kinds = (Kind.QUOTIENT, Kind.POWER)
        divisors = (eqn.inputs()[-1] for eqn in self.equations if eqn.kind in kinds)
        walks = (self.graph.walk(x, x.whole, follow) for x in divisors)
        return {x.eqn for origins in walks for x in origins if x.eqn}

    def _together(self, exps: dict[int, list[Eqn]]) -> list[tuple[int, list[Eqn]]]:
        """Groups exponentials of the same products, or that one sum divides."""
        groups = list(exps.items())
        dividing = (eqn for eqn in self.equations if eqn.kind in _DIVIDES)
        facts = (self.facts.inputs(eqn)[-1] for eqn in dividing)
        for bits in {x.sums for x in facts if x.sums and not x.products & ~x.sums}:
            joined = [x for x in groups if not x[0] & ~bits]
            groups = [x for x in groups if x not in joined]
            joined_exps = [exp for _, some in joined for exp in some]
            groups.append((union(x for x, _ in joined), joined_exps))
        return groups

    def _along(self, bit: int, atom: Atom) -> list[set[int]]:
        """Returns the dimensions of a product in each axis; `[]` if they are lost."""
        all_marks, _ = self.to_product(atom, atom.each(), bit)
        return [dimensions_in(x, self.facts.products[bit]) for x in all_marks or ()]

    def _weighs(self, eqn: Eqn, facts: Any) -> Iterator[tuple[int, Meeting]]:
        """Yields the products whose exponentials weigh other activations here."""
        for i in (0, 1):
            mine, other = facts[i], facts[1 - i]
            weights = mine.weights | mine.mixed
            if not weights or weights & (other.weights | other.products):
                continue
            # An entrywise weight is repeated along a dimension, so it weighs a vector.
            is_vector = self.is_repeated(eqn, i) and bool(weights & self.summed)
            if (other.is_deep or other.has_data) and (eqn.contracted or is_vector):
                yield weights, (eqn, i)

    def _over(self, eqn: Eqn, i: int) -> Over:
        """Returns the weights and the axes that they share with the values."""
        if eqn.contracted:
            return eqn.inputs()[i], tuple(pair[i] for pair in eqn.contracted)
        to = self.to(eqn)
        both = shared(to)
        return eqn.inputs()[i], tuple(a for a, d in enumerate(to[i]) if d in both)

    def to(self, eqn: Eqn) -> list[list[int | None]]:
        """Returns the product's dimension that each operand dimension becomes.

        In an entrywise product, dimensions of repeated entries have `None`.
        """
        if eqn.kind is Kind.CONTRACTION:
            return eqn.to
        dims: list[list[int | None]] = []
        out = eqn.output().shape
        for x in eqn.inputs():
            same, sizes = self.graph.copied(x), zip(x.shape, out, strict=False)
            is_kept = [n == m and d not in same for d, (n, m) in enumerate(sizes)]
            dims.append([d if kept else None for d, kept in enumerate(is_kept)])
        return dims

    def is_repeated(self, eqn: Eqn, i: int) -> bool:
        """Returns whether an operand is repeated along a dimension of the result."""
        atom = eqn.inputs()[i]
        return atom.shape != eqn.output().shape or bool(self.graph.copied(atom))

    # From the softmax to its products.

    def to_product(
        self, atom: Atom, all_marks: AllMarks, bit: int
    ) -> tuple[AllMarks | None, "Route"]:
        """Follows an array back to a product: its marks, or `None`, and the route."""
        arrived: list[AllMarks] = []
        route, target = Route(), self.facts.products[bit]

        def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
            if (eqn := origin.eqn) is None:
                return []
            if eqn is target:
                arrived.append(origin.all_marks)
                return []
            back, facts = [i for i, _ in moves(eqn, origin.k)], self.facts.inputs(eqn)
            route.eqns.append(eqn)
            linear = [i for i in back if (facts[i].products | facts[i].pairs) & bit]
            kind = eqn.kind
            if kind in (Kind.PRODUCT, Kind.QUOTIENT) and len(linear) == 1:
                route.factors.append((eqn, 1 - linear[0], origin.all_marks))
            elif kind is Kind.SOFTCAP:
                pass  # the logits are taken before it
            elif not back or _is_bent(eqn):
                route.nonlinear.append(eqn)  # such as a product with itself
            elif kind in (Kind.JOINED, Kind.PLACED):
                route.joins.append(eqn)
            elif kind in (Kind.SUM, Kind.DIFFERENCE):
                route.added += [(eqn, i) for i in sorted({*back} - {*linear})]
            return [(i, None) for i in linear]

        self.graph.back(atom, all_marks, ahead)
        merged = [functools.reduce(union_of, x) for x in zip(*arrived, strict=True)]
        return tuple(merged) or None, route

    def maxima(self, atom: Atom, bits: int) -> list[Eqn]:
        """Returns the maxima of some products' logits from which an array comes."""
        maxima: list[Eqn] = []

        def follow(eqn: Eqn, k: int) -> Iterable[int]:
            facts = self.facts.inputs(eqn)
            if eqn.kind is Kind.EXTREME and union(x.products for x in facts) & bits:
                maxima.append(eqn)
            elif eqn.kind not in (Kind.CONTRACTION, Kind.TOTAL):
                return range(len(eqn.jaxpr_eqn.invars))
            return ()

        self.graph.walk(atom, atom.whole, follow)
        return maxima

    def _product(self, eqn: Eqn, softmax: Softmax) -> Product:
        """Returns a product with the dimensions along which the softmax sums."""
        bit, lead = self.facts.product(eqn), len(eqn.frame.lead)
        shape = eqn.output().shape
        to = self.to(eqn)
        sides = [frozenset(lead + d for d in x if d is not None) for x in to]
        free = sides[0] - sides[1], sides[1] - sides[0]
        sums: list[frozenset[int]] = []
        kept: set[int] = set()
        for atom, axes in softmax.over:
            fact = self.facts.value(atom)
            if not (fact.products | fact.mixed) & bit:
                continue
            of_axis = self._along(bit, atom)
            if of_axis:
                kept.update(*of_axis)
                # Sorted entries lose their marks: the axis gets the remaining ones.
                rest = {a - lead for x in free for a in x} - kept
                dims = (of_axis[a] or (rest if atom.shape[a] > 1 else ()) for a in axes)
                sums.append(frozenset(lead + d for x in dims for d in x))
        if eqn.kind is not Kind.CONTRACTION:
            # Shared dimensions that reach no axis afterwards were summed over.
            over = [(d, d) for d in sorted(shared(to) - kept) if shape[d] > 1]
        else:
            over = eqn.contracted
        # The logits may have several softmaxes: prefer one over axes of one side alone.
        one_sided = [x for x in sums if x and any(x <= side for side in free)]
        # Soft experts have one over tokens, and one over slots, which is a router's.
        if (i := self.facts.weight_of(eqn)) is not None:
            one_sided.sort(key=lambda x: not x <= free[i])
        all_axes, apart = frozenset().union(*sums), free[0] | free[1]
        keys = one_sided[0] if one_sided else all_axes & apart
        if any(axes for _, axes in softmax.sums):
            keys = keys or all_axes  # as over the edges of a graph
        if not keys & apart:
            # A loop may take one key per trip: loops that one side and its values have.
            a, b = (self._trips(x) for x in eqn.inputs())
            weighed = (self._trips(y.inputs()[1 - i]) for y, i in softmax.meetings)
            loops = {x.name: x.axis for x in eqn.frame.lead if x.name in a ^ b}
            one, two = ({loops[x] for x in trips if x in loops} for trips in (a, b))
            free = free[0] | one, free[1] | two
            common = set().union(*weighed) & {*loops}
            keys = frozenset(loops[x] for x in common) or keys
        return Product(eqn, keys, to, over, free)

    def _trips(self, atom: Atom) -> set[Any]:
        """Returns the loops in which each trip uses another slice of an array."""
        sliced: set[Any] = set()

        def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
            back = moves(origin.eqn, origin.k) if origin.eqn else []
            if not back:
                pairs = zip(atom.loops, origin.all_marks, strict=True)
                sliced.update(x.name for x, marks in pairs if is_varied(marks))
            return [(i, None) for i, _ in back]

        self.graph.back(atom, atom.trips(), ahead)
        return sliced

    def products(self, softmax: Softmax) -> list[Product]:
        """Returns the products of query and key, or none if it is not attention."""
        eqns = [eqn for bit, eqn in self.facts.products.items() if bit & softmax.bits]
        products = (self._product(eqn, softmax) for eqn in eqns)
        candidates = [p for p in products if p.over]
        chosen = [p for p in candidates if self._is_of_activations(p.eqn)]
        # The inputs of query and key may enter the softmax again, for example squared.
        past = union(f.events for p in chosen for f in self.facts.inputs(p.eqn))
        more = [p for p in candidates if chosen and not self.facts.event(p.eqn) & past]
        chosen += [p for p in more if p not in chosen and self._is_relative(p)]
        # Logits with keys that are plain data may be divided by the same sum.
        chosen += [p for p in more if p not in chosen and self._is_of_data(p)]
        # Exponentials without a sum are decays, as in a state-space model.
        asked = candidates if softmax.sums else []
        chosen = chosen or [p for p in asked if self._is_asked(p, softmax)]
        return chosen or [
            p
            for p in candidates
            if self._is_of_data(p) and any(p.is_key) and self._has_values(p, softmax)
        ]

    def _is_of_activations(self, eqn: Eqn) -> bool:
        a, b = self.facts.inputs(eqn)[:2]
        is_weighted = self.facts.weight_of(eqn) is not None
        return bool(a.leaves and b.leaves) and not is_weighted

    def _is_of_data(self, product: Product) -> bool:
        """Returns whether one side is data that no parameter changed."""
        facts = self.facts.inputs(product.eqn)[:2]
        is_of_data = any(f.has_data and not f.leaves for f in facts)
        return is_of_data and any(f.is_deep for f in facts)

    def _has_values(self, product: Product, softmax: Softmax) -> bool:
        """Returns whether each key has a value vector; without one it may be a loss."""
        bit = self.facts.product(product.eqn)
        for eqn, i in softmax.meetings if softmax.sums else ():
            to, (atom, axes) = self.to(eqn), self._over(eqn, i)
            value_dims = {d for d in to[1 - i] if d is not None} - {*to[i]}
            dims = self._along(bit, atom)
            keys = {product.lead + d for a in axes if dims for d in dims[a]}
            # Sorted entries, such as the nearest ones, may come from any key.
            is_over = keys & product.keys or not keys
            if is_over and any(eqn.output().shape[d] > 1 for d in value_dims):
                return True
        return False

    def _is_relative(self, product: Product) -> bool:
        """Returns whether a parameter is the key, as relative positions are.

        If the activations already have both queries and keys, the product is a bias.
        """
        i = self.facts.weight_of(product.eqn)
        keys = product.keys
        return i is not None and (not keys or bool(keys & product.free[i]))

    def _is_asked(self, product: Product, softmax: Softmax) -> bool:
        """Returns whether parameters are the queries and activations the keys.

        The softmax is then along positions of the activations; a router's softmax is
        along the outputs of its kernel. Every query weighs the same values; a gate, as
        in xLSTM, weighs only the values that belong to it. Learned queries are several,
        or have a kernel, or meet keys that have one. Graph attention adds scores of
        both sides, which are no queries.
        """
        i = self.facts.weight_of(product.eqn)
        if i is None or product.eqn.kind is Kind.PRODUCT:
            return False
        query, key = product.operand(i), product.operand(1 - i)
        fact, other = self.facts.of(query), self.facts.of(key)
        is_over_data = bool(product.keys) and product.keys <= product.free[1 - i]
        if not is_over_data or not other.leaves or self._is_gate(product, i, softmax):
            return False
        is_many = any(product.sizes[a] > 1 for a in product.free[i])
        is_alone = softmax.bits == self.facts.product(product.eqn)
        return is_many or fact.is_pair or (is_alone and self._has_kernel(key))

    def _is_gate(self, product: Product, i: int, softmax: Softmax) -> bool:
        """Returns whether outputs of a weight each weigh values of their own."""
        bit = self.facts.product(product.eqn)
        for eqn, j in softmax.meetings:
            to, of_axis = self.to(eqn), self._along(bit, eqn.inputs()[j])
            both = shared(to)
            dims = (of_axis[d] for d, x in enumerate(to[j]) if x in both and of_axis)
            axes = {product.lead + d for x in dims for d in x}
            if any(product.sizes[a] > 1 for a in axes & product.free[i]):
                return True
        return False

    def _has_kernel(self, key: Atom) -> bool:
        """Returns whether an activation is linear in the one kernel that made it."""
        summands = self.scaling.of(key, key.whole)
        factors = [f for s in summands for f in s.linear[:1]]
        is_made_by_one = self.facts.of(key).only_kernel is not None
        return is_made_by_one and len(factors) == len(summands)

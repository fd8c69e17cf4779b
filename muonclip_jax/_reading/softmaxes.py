"""Where attention is: products that are normalized, and then weigh activations.

A product of query and key becomes weights by an exponential that is divided by its own
sum, or by another function. From there it is followed back, with labels.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .facts import Facts, members, union
from .graph import Atom, Eqn, Graph, Labels, Origin
from .jaxprs import names
from .labels import along, either, is_varied, Label, moved, small
from .primitives import ELEMENTWISE, moves, PRODUCTS, shared
from .scaling import Scaling


# Of entries along an axis.
_COMPARES = names("reduce_sum reduce_max sort top_k approx_top_k cumsum cumlogsumexp")


class Product(NamedTuple):
    """A product of query and key, as it enters a softmax."""

    at: Eqn
    keys: frozenset[int]  # its dimensions that the softmax is over
    # For each operand, the dimension of the product that each of its own is.
    to: list[list[int | None]]
    # Pairs of dimensions of the operands that it sums over.
    over: list[tuple[int, int]]
    # Dimensions of the product that one operand alone has.
    free: tuple[frozenset[int], frozenset[int]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.at.output().shape

    @property
    def lead(self) -> int:
        return self.at.output().lead

    @property
    def rank(self) -> int:
        """The length of its labels."""
        return self.at.output().rank

    @property
    def is_key(self) -> list[bool]:
        """For each operand, whether it alone has what the softmax is over."""
        return [bool(self.keys) and self.keys <= x for x in self.free]

    def operand(self, i: int) -> Atom:
        return self.at.inputs()[i]

    def side(self, i: int, label: Label) -> Label:
        """The label of an operand, from that of the product."""
        return small(moved(label, self.lead, self.to[i]))

    def over_of(self, i: int) -> Labels:
        """Marks along the dimensions of an operand that are summed over."""
        atom, dims = self.operand(i), [pair[i] for pair in self.over]
        return atom.marks(d for d in dims if atom.shape[d] > 1)


@dataclasses.dataclass
class Path:
    """The path between a product and what was made of it."""

    caps: list[tuple[Eqn, float]] = dataclasses.field(default_factory=list)
    # What it was multiplied with or divided by: which operand, and the result's labels.
    factors: list[tuple[Eqn, int, Labels]] = dataclasses.field(default_factory=list)
    added: list[tuple[Eqn, int]] = dataclasses.field(default_factory=list)
    nonlinear: list[Eqn] = dataclasses.field(default_factory=list)
    joins: list[Eqn] = dataclasses.field(default_factory=list)


#: An array, and axes of it that something is over.
Over = tuple[Atom, tuple[int, ...]]


class Softmax(NamedTuple):
    """Products that are normalized together, by whatever function."""

    bits: int
    exps: list[Eqn]  # none where it is another function than an exponential
    over: list[Over]
    is_summed: bool = True  # it is seen to divide by a sum


def known_number(factor: Atom) -> float:
    """The number that logits are multiplied with, if it is one; else NaN."""
    number = factor.number
    return number if isinstance(number, int | float) and number else math.nan


def exponent(at: Eqn) -> int | None:
    """Which operand an exponential is of."""
    if at.name in ("exp", "exp2"):
        return 0
    if at.name == "pow" and isinstance(at.inputs()[0].number, int | float):
        return 1
    return None


class Softmaxes:
    """Finds all attention of a graph."""

    def __init__(self, graph: Graph, facts: Facts):
        self.graph, self.facts = graph, facts
        self.scaling = Scaling(graph, facts)
        self.equations = list(graph.top.equations())
        # The sums by which softmaxes divide, with the products that they are of.
        self.sums = list(self._sums())
        self.summed = union(bits for bits, _ in self.sums)
        # Where entries of products are compared along axes, or summed up.
        self.compared = list(self._comparisons())
        # Parameters that no gradient reaches are as good as data.
        trained = union(x.trained for x in facts.outputs)
        self.frozen = {*members(union(x.leaves for x in facts.outputs) & ~trained)}

    def _sums(self) -> Iterator[tuple[int, Over]]:
        """Products, what is summed of their exponentials, and along which axes."""
        for at in self.equations:
            if at.name == "reduce_sum":
                atom, axes = at.inputs()[0], tuple(at.eqn.params["axes"])
            elif at.name in ("scatter-add", "scatter_add"):  # over edges of a graph
                atom, numbers = at.inputs()[-1], at.eqn.params["dimension_numbers"]
                own = range(len(atom.shape))
                axes = tuple(d for d in own if d not in numbers.update_window_dims)
            else:
                continue
            if bits := self.facts.of(atom).unshared:
                yield bits, (atom, axes)

    def _comparisons(self) -> Iterator[tuple[int, Over]]:
        for at in self.equations:
            if at.name not in _COMPARES:
                continue
            params = at.eqn.params
            one = params.get("dimension", params.get("axis", -1))  # of a sort, a scan
            axes = params.get("axes", (one,))
            for atom in at.inputs():
                fact = self.facts.of(atom)
                if fact.products and not fact.weights:
                    yield fact.products, (atom, tuple(axes))

    def all(self) -> Iterator[Softmax]:
        """Groups of products that were normalized and weigh activations."""
        weighed: list[tuple[int, Over]] = []
        exps: dict[int, list[Eqn]] = {}
        for at in self.equations:
            if at.inside:
                continue
            facts = self.facts.inputs(at)
            if (i := exponent(at)) is not None and facts[i].products:
                exps.setdefault(facts[i].products, []).append(at)
            elif at.name in PRODUCTS or at.name == "mul":
                weighed += self._weighs(at, facts)
        seen = 0
        for bits, own in exps.items():
            places = [x for b, x in weighed if b & bits]
            if places and bits & ~seen:
                seen |= bits
                # Where it divides by no sum that is seen, as one that values with a
                # column of ones bring, it is over what it weighs.
                sums = [x for b, x in self.sums if b & bits]
                yield Softmax(bits, own, sums or places, bool(sums))
        # Weights that are made in another way than by exponentials.
        for at in self.equations:
            if at.contracted:
                facts = self.facts.inputs(at)
                for i, (a, b) in enumerate((facts, facts[::-1])):
                    axes = tuple(pair[i] for pair in at.contracted)
                    over = at.inputs()[i], axes
                    bits = a.bent & ~seen
                    if not b.is_deep or bits & b.products:
                        continue
                    if bits := self._compared_along(bits, over):
                        seen |= bits
                        yield Softmax(bits, [], [over])

    def _compared_along(self, bits: int, over: Over) -> int:
        """The products whose entries are compared along what they are weighed over.

        A norm compares features, and then values may be summed over the tokens.
        """

        def dims(bit: int, atom: Atom, axes: tuple[int, ...]) -> set[int]:
            along = self._along(bit, atom) or []
            return set().union(*(along[a] for a in axes if along))

        kept = 0
        for bit in (1 << i for i in members(bits)):
            places = [x for b, x in self.compared if b & bit]
            if places and (own := dims(bit, *over)):
                kept |= bit if any(own & dims(bit, *x) for x in places) else 0
        return kept

    def _along(self, bit: int, atom: Atom) -> list[set[int]] | None:
        """For each axis of what a product became, its dimensions that this comes of."""
        at = self.facts.products[bit]
        labels, _ = self.to_product(atom, atom.each(), bit)
        if labels is None:
            return None
        lead, rank = len(at.frame.lead), len(at.output().shape)

        def comes(label: Label, axis: int) -> bool:
            # Not where a slice only left zeros around the same marks.
            line = along(label, axis)
            return len(line) > 1 and (is_varied(line) or bool(line.all()))

        return [{d for d in range(rank) if comes(x, lead + d)} for x in labels]

    def _weighs(self, at: Eqn, facts: Any) -> Iterator[tuple[int, Over]]:
        """The products whose exponentials weigh other activations here."""
        for i in (0, 1):
            mine, other, atom = facts[i], facts[1 - i], at.inputs()[i]
            own = mine.weights | mine.mixed
            if not own or own & (other.weights | other.products):
                continue
            if at.name == "mul":
                # Each weighs a vector, and so is the same along a dimension.
                if other.is_deep and self.is_repeated(at, i) and own & self.summed:
                    yield own, (atom, ())
            elif at.contracted and (other.is_deep or other.has_data):
                yield own, (atom, tuple(pair[i] for pair in at.contracted))

    def is_repeated(self, at: Eqn, i: int) -> bool:
        """Whether an operand is repeated along a dimension of an entrywise result."""
        atom = at.inputs()[i]
        return atom.shape != at.output().shape or bool(self.graph.copied(atom))

    # From the softmax to its products.

    def to_product(
        self, atom: Atom, labels: Labels, bit: int
    ) -> tuple[Labels | None, "Path"]:
        """The labels of a product's result, from those of what was made of it."""
        found: list[Labels] = []
        path, target = Path(), self.facts.products[bit]

        def ahead(origin: Origin, scale: float) -> list[tuple[int, float]]:
            if (at := origin.at) is None:
                return []
            if at is target:
                found.append(origin.labels)
                return []
            inputs, back = at.inputs(), [i for i, _ in moves(at, origin.k)]
            facts = self.facts.inputs(at)
            linear = [i for i in back if (facts[i].products | facts[i].pairs) & bit]
            if at.name in ("mul", "div") and len(linear) == 1:
                other = 1 - linear[0]
                path.factors.append((at, other, origin.labels))
                number = known_number(inputs[other])
                scale = scale * number if at.name == "mul" else scale / number
            elif at.name in ("mul", "div"):
                path.nonlinear.append(at)  # of itself, as what it is divided by
            elif at.name == "tanh":
                path.caps.append((at, scale))
            elif (at.name in ELEMENTWISE and exponent(at) is None) or not back:
                path.nonlinear.append(at)
            elif at.name in ("concatenate", "pad", "dynamic_update_slice"):
                path.joins.append(at)
            elif at.name in ("add", "sub", "add_any"):
                path.added += [(at, i) for i in sorted({*back} - {*linear})]
            return [(i, scale) for i in linear]

        self.graph.back(atom, labels, ahead, 1.0)
        if not found:
            return None, path
        out = found[0]
        for more in found[1:]:
            out = tuple(either(x, y) for x, y in zip(out, more, strict=True))
        return out, path

    def maxima(self, atom: Atom, bits: int) -> list[Eqn]:
        """The maxima of some products' logits that an array was made of."""
        found: list[Eqn] = []

        def ahead(origin: Origin, _: None) -> list[tuple[int, None]]:
            at = origin.at
            if at is None or at.name in PRODUCTS or at.name == "reduce_sum":
                return []
            if at.name != "reduce_max":
                return [(i, None) for i in range(len(at.eqn.invars))]
            if self.facts.of(at.inputs()[0]).products & bits:
                found.append(at)
            return []

        self.graph.back(atom, atom.whole, ahead)
        return found

    def _product(self, at: Eqn, softmax: Softmax) -> Product:
        """A product, with its dimensions that the softmax is over."""
        bit, dims = self.facts.product(at), at.output().shape
        found: list[frozenset[int]] = []
        kept: set[int] = set()
        for atom, axes in softmax.over:
            if not (self.facts.of(atom).products | self.facts.of(atom).mixed) & bit:
                continue
            along = self._along(bit, atom)
            if along is not None:
                found.append(frozenset().union(*(along[a] for a in axes)))
                kept.update(*along)
        if at.name in ("mul", "sub"):
            # What nothing comes of entry by entry was summed over.
            to = [self._dims(x, at.output()) for x in at.inputs()]
            own = shared(to)
            over = [(d, d) for d in sorted(own - kept) if dims[d] > 1]
        else:
            to, over = at.to, at.contracted
        own = [frozenset(d for d in x if d is not None) for x in to]
        free = own[0] - own[1], own[1] - own[0]
        # Of several softmaxes of the same logits the one over what one side alone has.
        known = [x for x in found if x and any(x <= side for side in free)]
        keys = known[0] if known else frozenset().union(*found)
        return Product(at, keys, to, over, free)

    def _dims(self, atom: Atom, out: Atom) -> list[int | None]:
        """The dimensions of an entrywise product along which an operand is no copy."""
        if len(atom.shape) != len(out.shape):
            return [None] * len(atom.shape)
        same = self.graph.copied(atom)
        pairs = enumerate(zip(atom.shape, out.shape, strict=True))
        return [d if d not in same and n == m else None for d, (n, m) in pairs]

    def products(self, softmax: Softmax) -> list[Product]:
        """The products of query and key; none where a softmax is no attention's."""
        bits, products = softmax.bits, self.facts.products.items()
        every = [self._product(at, softmax) for bit, at in products if bit & bits]
        every = [p for p in every if p.over]
        own = [p for p in every if self._is_of_activations(p.at)]
        # What query and key were made of may enter the softmax again, as their squares.
        past = union(f.past for p in own for f in self.facts.inputs(p.at))
        more = [p for p in every if own and not self.facts.event(p.at) & past]
        own += [p for p in more if p not in own and self._is_relative(p)]
        # Exponentials that no sum divides are decays, as of a state space.
        asked = every if softmax.is_summed else []
        own = own or [p for p in asked if self._is_asked(p)]
        return own or [p for p in every if self._is_of_data(p)]

    def _is_of_activations(self, at: Eqn) -> bool:
        a, b = self.facts.inputs(at)[:2]
        is_weighted = self.facts.weight_of(at) is not None
        return bool(a.leaves and b.leaves) and not is_weighted

    def _is_of_data(self, product: Product) -> bool:
        """Whether one side is data as they are, of the examples that the other has.

        Without examples it may be any table of numbers.
        """
        facts = self.facts.inputs(product.at)[:2]
        is_of_data = any(f.has_data and not f.leaves for f in facts)
        has_examples = product.at.name != "mul" and bool(shared(product.to))
        is_sided = any(product.is_key)
        return (
            is_of_data and any(f.is_deep for f in facts) and has_examples and is_sided
        )

    def _is_relative(self, product: Product) -> bool:
        """Whether a parameter is the key of one more product, as relative positions.

        What activations have along queries and keys already is a bias.
        """
        i = self.facts.weight_of(product.at)
        keys = product.keys
        return i is not None and (not keys or bool(keys & product.free[i]))

    def _is_asked(self, product: Product) -> bool:
        """Whether parameters are the queries of what activations are the keys of.

        The softmax is over what the activations alone have, as positions; a router's is
        over the outputs of its kernel. Learned queries are several, or have a kernel.
        """
        i = self.facts.weight_of(product.at)
        if i is None or product.at.name == "mul":
            return False
        fact, other = (self.facts.of(product.at.inputs()[j]) for j in (i, 1 - i))
        is_over_data = bool(product.keys) and product.keys <= product.free[1 - i]
        is_many = any(product.shape[d] > 1 for d in product.free[i])
        return is_over_data and other.leaves != 0 and (fact.is_pair or is_many)

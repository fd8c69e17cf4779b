"""Attention, read backwards: what makes each head's logits larger.

From the product that weighs values back to the exponential, from there to the product
of query and key, and from there to the parameters.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .facts import Facts, members, union
from .graph import Atom, Eqn, Graph, Labels
from .labels import contracted, either, ELEMENTWISE, marks, moves, PRODUCTS, sides
from .roles import Layer, LayerReader
from .scaling import Scaling


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


@dataclasses.dataclass
class Path:
    """What is between a product and what was made of it."""

    caps: list[tuple[Eqn, float]] = dataclasses.field(default_factory=list)
    # What it was multiplied with or divided by: which operand, and the result's labels.
    factors: list[tuple[Eqn, int, Labels]] = dataclasses.field(default_factory=list)
    added: list[tuple[Eqn, int]] = dataclasses.field(default_factory=list)
    nonlinear: list[Eqn] = dataclasses.field(default_factory=list)
    joins: list[Eqn] = dataclasses.field(default_factory=list)


class Reader:
    """Finds all attention of a graph."""

    def __init__(self, graph: Graph, facts: Facts):
        self.graph, self.facts = graph, facts
        self.scaling = Scaling(graph, facts)
        self.equations = list(graph.top.equations())
        # The sums by which softmaxes divide, with the products that they are of.
        self.sums = list(self._sums())
        # Parameters that no gradient reaches are as good as data.
        trained = union(x.trained for x in facts.outputs)
        self.frozen = {*members(union(x.leaves for x in facts.outputs) & ~trained)}

    def layers(self) -> list[Layer]:
        found = [x for group in self._softmaxes() if (x := self._layer(*group))]
        return sorted(found, key=lambda x: x.products[0].at)

    def _sums(self) -> Iterator[tuple[int, Atom, tuple[int, ...]]]:
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
                yield bits, atom, axes

    def _softmaxes(self) -> Iterator[tuple[int, list[Eqn], list[Any]]]:
        """Groups of products whose exponentials are summed and weigh activations."""
        weighed = 0
        exps: dict[int, list[Eqn]] = {}
        for at in self.equations:
            if at.i in at.frame.inside:
                continue
            facts = self.facts.all_of(at.inputs())
            if at.name in ("exp", "exp2") and facts[0].products:
                exps.setdefault(facts[0].products, []).append(at)
            elif at.name in PRODUCTS or at.name == "mul":
                weighed |= self._weighs(at, facts)
        seen = 0
        for bits, own in exps.items():
            sums = [x[1:] for x in self.sums if x[0] & bits]
            if bits & weighed and sums and not bits & seen:
                seen |= bits
                yield bits, own, sums

    def _weighs(self, at: Eqn, facts: Any) -> int:
        """The products whose softmax weighs, in this equation, other activations."""
        found = 0
        for i in (0, 1):
            mine, other = facts[i], facts[1 - i]
            own = mine.weights | mine.mixed
            if not own or own & (other.weights | other.products):
                continue
            if at.name == "mul":
                # Each weighs a vector, and so is the same along a dimension.
                is_many = bool(
                    self.graph.copied(at.inputs()[i])
                    or at.inputs()[i].shape != at.output().shape
                )
                found |= own if other.is_deep and is_many else 0
            elif contracted(at.eqn) and (other.is_deep or other.has_data):
                found |= own
        return found

    # From the softmax to its products.

    def to_product(
        self, atom: Atom, labels: Labels, bit: int
    ) -> tuple[Labels | None, "Path"]:
        """The labels of a product's result, from those of what was made of it."""
        found: list[Labels] = []
        path = Path()
        target, known = self.facts.products[bit], set()

        def follow(atom: Atom, labels: Labels, seen: Any, scale: float) -> None:
            for origin, after in self.graph.origins(atom, labels, seen):
                at = origin.at
                if at is None:
                    continue
                key = (
                    id(at.frame),
                    at.i,
                    *((x.shape, tuple(x.ravel().tolist())) for x in origin.labels),
                )
                if key in known:
                    continue
                known.add(key)
                if at.frame is target.frame and at.i == target.i:
                    found.append(origin.labels)
                    continue
                inputs = at.inputs()
                facts = self.facts.all_of(inputs)
                back = moves(at.eqn, origin.k, len(at.frame.lead), at.frame.number)
                own = [
                    (i, move)
                    for i, move in back
                    if (facts[i].products | facts[i].pairs) & bit
                ]
                if at.name in ("mul", "div") and len(own) == 1:
                    other = 1 - own[0][0]
                    number = inputs[other].frame.number(inputs[other].var)
                    path.factors.append((at, other, origin.labels))
                    number = number if isinstance(number, int | float) else math.nan
                    scale = (
                        scale * number
                        if at.name == "mul"
                        else scale / number
                        if number
                        else math.nan
                    )
                elif at.name == "tanh":
                    path.caps.append((at, scale))
                elif (
                    at.name in ELEMENTWISE and at.name not in ("exp", "exp2")
                ) or not back:
                    path.nonlinear.append(at)
                elif at.name in ("concatenate", "pad", "dynamic_update_slice"):
                    path.joins.append(at)
                elif at.name in ("add", "sub", "add_any"):
                    path.added += [
                        (at, i) for i, _ in back if i not in [j for j, _ in own]
                    ]
                for i, move in own:
                    follow(inputs[i], tuple(map(move, origin.labels)), after, scale)

        follow(atom, labels, frozenset(), 1.0)
        if not found:
            return None, path
        out = found[0]
        for more in found[1:]:
            out = tuple(either(x, y) for x, y in zip(out, more, strict=True))
        return out, path

    def maxima(self, atom: Atom, bits: int) -> list[Eqn]:
        """The maxima of some products' logits that an array was made of."""
        found: list[Eqn] = []
        seen: set[Any] = set()

        def follow(atom: Atom, depth: int) -> None:
            label = np.ones([1] * (len(atom.frame.lead) + len(atom.shape)), np.int64)
            for origin, _ in self.graph.origins(atom, (label,)):
                at = origin.at
                if at is None or (id(at.frame), at.i) in seen or depth > 12:
                    continue
                seen.add((id(at.frame), at.i))
                if (
                    at.name == "reduce_max"
                    and self.facts.of(at.inputs()[0]).products & bits
                ):
                    found.append(at)
                elif at.name not in PRODUCTS and at.name != "reduce_sum":
                    for x in at.inputs():
                        follow(x, depth + 1)

        follow(atom, 0)
        return found

    def _product(self, at: Eqn, keys: frozenset[int]) -> Product:
        shape = at.output().shape
        if at.name == "mul":
            to: list[list[int | None]] = []
            for x in at.inputs():
                same = self.graph.copied(x)
                to.append(
                    [
                        d if d not in same and x.shape[d] == shape[d] else None
                        for d in range(len(x.shape))
                    ]
                    if len(x.shape) == len(shape)
                    else [None] * len(x.shape)
                )
            both = {d for d in to[0] if d is not None} & {
                d for d in to[1] if d is not None
            }
            over: list[tuple[int, int]] = []
        else:
            to = sides(at.eqn) or [[], []]
            over = contracted(at.eqn)
        own = [frozenset(d for d in x if d is not None) for x in to]
        return Product(at, keys, to, over, (own[0] - own[1], own[1] - own[0]))

    def _layer(self, bits: int, exps: list[Eqn], sums: list[Any]) -> Layer | None:
        products = [at for bit, at in self.facts.products.items() if bit & bits]
        found: list[Product] = []
        for at in products:
            bit = self.facts.product(at)
            keys: set[int] = set()
            for x, axes in sums:
                if not self.facts.of(x).unshared & bit:
                    continue
                first = len(x.frame.lead)
                rank = first + len(x.shape)
                own = tuple(marks(rank, first + a, x.shape[a]) for a in axes)
                labels, _ = self.to_product(x, own, bit)
                if labels is None:
                    continue
                inner = len(at.frame.lead)
                for label in labels:
                    keys |= {
                        d
                        for d in range(len(at.output().shape))
                        if label.shape[inner + d] > 1
                    }
            found.append(self._product(at, frozenset(keys)))
        found = [p for p in found if p.over or p.at.name == "mul"]
        own = [p for p in found if self._is_of_activations(p.at)]
        own += [p for p in found if own and p not in own and self._is_relative(p)]
        own = own or [p for p in found if self._is_asked(p)]
        if not own:
            return None
        return LayerReader(self, own, exps).read()

    def _is_of_activations(self, at: Eqn) -> bool:
        a, b = self.facts.all_of(at.inputs()[:2])
        is_weighted = self.facts.weight_of(at) is not None
        return bool(a.leaves and b.leaves) and not is_weighted

    def _is_relative(self, product: Product) -> bool:
        """Whether a parameter is the key, as of relative positions, in one more product.

        What activations have along queries and keys already is a bias.
        """
        i = self.facts.weight_of(product.at)
        return i is not None and bool(product.keys & product.free[i])

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

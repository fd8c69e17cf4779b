"""Facts about what each variable is made of, found in one forward pass.

A fact has a few bits. It says where to look; marks then go back from there.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, assert_never

import jax.numpy as jnp

from . import jaxprs
from .fact import DATA, Fact, joined, members, NO_LOGITS, seen, union, with_logits_of
from .forward import Forward
from .graph import Atom, Eqn, Graph
from .modulated import Modulated, modulated
from .primitives import Kind


class Facts(Forward[Fact]):
    """The facts about all variables of a graph."""

    def __init__(self, graph: Graph, tokens: frozenset[int] = frozenset()):
        super().__init__(Fact())
        self.graph = graph
        self.products: dict[int, Eqn] = {}  # keyed by bit
        self._bits: dict[Eqn, int] = {}
        self._events: dict[Eqn, int] = {}
        self._past_of: dict[int, int] = {}
        self._modulated: dict[Eqn, tuple[int, list[Modulated]]] = {}
        self.norm_events = 0  # in which a weight is applied to compute its own norm
        self.choosing = 0  # parameters in indices, comparisons and other steps
        self.sloped = 0  # parameters that receive a gradient through slopes
        self.has_slopes = False  # whether any value is of a backward pass
        inputs = [
            Fact(1 << i, 1 << i, 1 << i, is_deep=i in tokens)
            if i in graph.parameters
            else DATA
            for i in range(len(graph.top.inputs))
        ]
        self.outputs = [*map(seen, self.run(graph.top, inputs)), *self._unused()]

    def of(self, atom: Atom) -> Fact:
        """Returns the fact about a variable, as it is outside of backward passes."""
        fact = self._of.get(atom, self._nothing)
        return DATA if fact.is_slope else fact

    def inputs(self, eqn: Eqn) -> list[Fact]:
        facts = super().inputs(eqn)
        if self.has_slopes and not eqn.is_slope:
            return [*map(seen, facts)]
        return facts

    def _unused(self) -> list[Fact]:
        """Returns the facts of results that are differentiated, but not used."""
        facts: list[Fact] = []
        frames = [self.graph.top]
        for frame in frames:
            frames += (inner for eqn in frame.live for inner in eqn.inside)
            eqns = [x for x in frame.live if jaxprs.is_differentiated(x.jaxpr_eqn)]
            if not eqns:
                continue
            used = {id(x.var) for eqn in frame.live for x in eqn.inputs()}
            used |= {id(x.var) for x in frame.outputs}
            unused = (x for eqn in eqns for x in eqn.outputs() if id(x.var) not in used)
            facts += [self.of(x) for x in unused if self.of(x).leaves]
        return facts

    def event(self, eqn: Eqn) -> int:
        """Returns the bit of an event; 0 for other equations."""
        return self._events.get(eqn, 0)

    def meetings(self, parameter: int) -> int:
        """Returns the events in which a parameter, in a weight, meets activations."""
        return self._meetings.get(parameter, 0)

    @functools.cached_property
    def _meetings(self) -> dict[int, int]:
        meetings: dict[int, int] = {}
        for eqn, event in self._events.items():
            for parameter in members(
                union(x.leaves for x in self.inputs(eqn) if x.is_weight)
            ):
                meetings[parameter] = meetings.get(parameter, 0) | event
        return meetings

    def upstream(self, event: int) -> int:
        """Returns the events that the operands of an event depend on."""
        return self.of(self._eqns[event].output()).events & ~event if event else 0

    @functools.cached_property
    def _eqns(self) -> dict[int, Eqn]:
        return {event: eqn for eqn, event in self._events.items()}

    def kernels_of(self, event: int) -> int:
        """Returns the parameters in the weights of an event, given by its number."""
        facts = self.inputs(self._eqns[1 << event])
        return union(x.leaves for x in facts if x.is_weight)

    def product(self, eqn: Eqn) -> int:
        """Returns the bit of a product; 0 for other equations."""
        return self._bits.get(eqn, 0)

    def modulated(self, eqn: Eqn) -> tuple[int, list[Modulated]]:
        """Returns the operand of a product that is a kernel times activations."""
        if eqn in self._modulated:
            return self._modulated[eqn]
        result = modulated(self.graph, self, eqn)
        # In a loop, the facts of later equations of a trip may still grow.
        if not any(x.is_loop for x in eqn.frame.lead):
            self._modulated[eqn] = result
        return result

    def before(self, events: int) -> int:
        """Returns the events that the given events depend on, without themselves."""
        return union(self._past_of[1 << i] & ~(1 << i) for i in members(events))

    def either(self, values: Sequence[Fact]) -> Fact:
        first, *others = values
        if all(x == first for x in others):
            return first
        if not all(x.is_slope or not x.leaves for x in values):
            values = [*map(seen, values)]
        return joined(values)

    def begun(self, value: Fact) -> Fact:
        """Clears the events of earlier trips: each trip has parameters of its own."""
        return value._replace(events=0)

    def result(self, eqn: Eqn, atom: Atom, value: Fact) -> Fact:
        if is_choice(eqn, atom):
            value = value._replace(**NO_LOGITS)
        if eqn.kind in (Kind.STEP, Kind.STOPPED) or not is_inexact(atom):
            self.choosing |= value.unstopped
            value = value._replace(trained=0)
        elif eqn.kind is Kind.ORDER:
            # Keys get no gradient from operands that are sorted by them.
            operand = self.inputs(eqn)[eqn.outputs().index(atom)]
            value = value._replace(trained=operand.trained)
        if value.is_deep and eqn.is_slope:
            self.has_slopes = True
            self.sloped |= value.trained
            value = value._replace(is_slope=True)
        return value

    def called(self, eqn: Eqn) -> list[Fact]:
        outs = super().called(eqn)
        if eqn.name == "cond":
            # The index of the branch affects the result, too, as a router of experts.
            past = self.inputs(eqn)[0].past
            outs = [x._replace(past=x.past | past) if x.is_deep else x for x in outs]
        if jaxprs.has_slopes(eqn.jaxpr_eqn):
            # Its own rule says where gradients go, whatever it computes.
            trained = union(x.trained for x in self.inputs(eqn))
            outs = [x._replace(trained=trained & x.leaves) for x in outs]
        return outs

    def more(self, eqn: Eqn) -> Fact:
        return self._mixed(eqn, self.inputs(eqn))

    # Equations.

    def primitive(self, eqn: Eqn) -> Fact:
        inputs, kind = self.inputs(eqn), eqn.kind
        if kind is Kind.PICKED and inputs[0].is_weight:
            return self._picked(eqn, inputs)
        out = self._mixed(eqn, inputs)
        if eqn.is_product:
            return self._product(eqn, inputs, out)
        if not kind.is_known and out.is_weight:
            return self._register_event(eqn, out)._replace(is_deep=True)
        if _is_onehot(eqn, inputs):
            out = out._replace(is_onehot=True)
        match kind:
            case Kind.SAME:
                return inputs[0]
            case Kind.STOPPED:
                return inputs[0]._replace(unstopped=0)
            case Kind.GENERATED:
                return Fact(has_data=out.has_data)
            case Kind.COUNTER:
                return Fact(is_counter=True)
            case Kind.REPEATED:
                old, new = (math.prod(x.shape) for x in (eqn.inputs()[0], eqn.output()))
                is_new = out.is_weight and old < new
                return out._replace(is_spread=out.is_spread or is_new)
            case Kind.PICKED:
                # An index only says where: the logits are those of the first operand.
                return with_logits_of(inputs[0], out)
            case Kind.SUM | Kind.DIFFERENCE | Kind.LARGER:
                return self._sum(eqn, inputs, out)
            case Kind.PRODUCT | Kind.CONTRACTION:
                return self._times(eqn, inputs, out)
            case Kind.QUOTIENT:
                a, b = inputs
                out = with_logits_of(a, out)
                return out._replace(normalized=a.normalized | a.weights & b.sums)
            case Kind.EXPONENTIAL:
                return out._replace(weights=out.weights | inputs[-1].products)
            case Kind.LOGARITHM:  # as in softplus, which is no exponential
                return out._replace(weights=0, mixed=0)
            case Kind.EXTREME:  # a maximum of logits is a number to subtract
                return out._replace(**NO_LOGITS)
            case Kind.TOTAL:
                return self._total(eqn, out)
            case (
                Kind.PERMUTED
                | Kind.CUT
                | Kind.JOINED
                | Kind.PLACED
                | Kind.CHOICE
                | Kind.LINEAR
                | Kind.POWER
                | Kind.SOFTCAP
                | Kind.BENT
                | Kind.STEP
                | Kind.EQUAL
                | Kind.POOLED
                | Kind.FOLDED
                | Kind.LOG_TOTAL
                | Kind.SCATTERED
                | Kind.MIXED
                | Kind.ORDER
                | Kind.WINNER
                | Kind.EXCHANGED
                | Kind.ALGEBRA
                | Kind.UNKNOWN
            ):
                return out
            case _:
                assert_never(kind)

    def weight_of(self, eqn: Eqn) -> int | None:
        """Returns which operand is the weight for the other; `None` for neither."""
        a, b, *_ = self.inputs(eqn)
        if a.is_weight and b.is_weight:
            tokens = [a.is_token, b.is_token]
            return 1 - tokens.index(True) if sum(tokens) == 1 else None
        return 0 if a.is_weight else 1 if b.is_weight else None

    def _product(self, eqn: Eqn, inputs: list[Fact], out: Fact) -> Fact:
        """Returns the fact of a product, with a weight or of two activations."""
        a, b = inputs[:2]
        # A product with logits or softmax weights makes a new value that is neither.
        out = out._replace(**NO_LOGITS)
        if not out.leaves:
            return out
        out = out._replace(products=self.new_product(eqn))
        if a.is_weight and b.is_weight and not (a.is_token or b.is_token):
            return out._replace(is_spread=False, is_shifted=False, is_pair=True)
        i = self.weight_of(eqn)
        out = self._register_event(eqn, out)
        out = out._replace(is_deep=True, is_pair=False, is_spread=False)
        if not (a.leaves and b.leaves):
            # A matrix that is no parameter, such as ones, sums or mixes exponentials.
            weights, other = a.weights | b.weights, eqn.to[1 if a.leaves else 0]
            sums = a.unnormalized | b.unnormalized if eqn.contracted else 0
            is_matrix = any(d not in eqn.shared for d in other if d is not None)
            mixed = weights if is_matrix else 0
            out = out._replace(sums=sums and sums | out.products, mixed=mixed)
        if i is None:
            # An activation that is multiplied with another one is no output yet.
            is_sum = a.is_deep and b.is_deep and eqn.contracted
            # Attention of two hops: weights times weights are weights.
            if a.weights | a.mixed and b.weights | b.mixed:
                out = out._replace(mixed=a.weights | a.mixed | b.weights | b.mixed)
            _, kernels = self.modulated(eqn)
            if kernels:
                # The same as without the activations that scale the kernel.
                leaves = union(self.of(x.atom).leaves for x in kernels)
                return out._replace(writers=self.event(eqn), kernels=leaves)
            return out._replace(kernels=-1, writers=0) if is_sum else out
        weight, other = inputs[i], inputs[1 - i]
        out = out._replace(mixed=other.weights)
        if other.is_onehot:  # a lookup, which does not count as a layer
            return out._replace(writers=0, kernels=0)
        return out._replace(writers=self.event(eqn), kernels=weight.leaves)

    def _picked(self, eqn: Eqn, inputs: list[Fact]) -> Fact:
        """Returns the fact of entries of a parameter: a slice, rows or matrices."""
        table, past = inputs[0], union(x.past for x in inputs)
        if eqn.name == "dynamic_slice" or not _is_row(eqn):
            return table._replace(past=past)
        # A row of a table. Its index does not count as an input of the layers that
        # follow: an output head, for example, chooses the next token.
        return self._register_event(eqn, table)._replace(is_deep=True, is_spread=False)

    def _is_shift(self, eqn: Eqn, inputs: list[Fact]) -> bool:
        """Whether data is added to a weight, or multiplied with each of its entries.

        A kernel may be scaled or masked by data, too. A shifted weight therefore counts
        as an activation only where it meets another kernel in a product.
        """
        data = [x for x, f in zip(eqn.inputs(), inputs, strict=True) if f == DATA]
        is_sum = eqn.kind in (Kind.SUM, Kind.DIFFERENCE)
        return any(sum(n > 1 for n in x.shape) > (not is_sum) for x in data)

    def _is_of_norms(self, eqn: Eqn, inputs: list[Fact]) -> bool:
        """Whether each activation has one entry, or is a copy along a dimension."""
        deep = [x for x, f in zip(eqn.inputs(), inputs, strict=True) if f.is_deep]
        return all(math.prod(x.shape) == 1 or self.graph.copied(x) for x in deep)

    def _register_event(self, eqn: Eqn, out: Fact) -> Fact:
        """Returns the fact `out` of an equation after registering it as an event."""
        bit = self._events.setdefault(eqn, 1 << len(self._events))
        self._past_of[bit] = self._past_of.get(bit, 0) | out.past | bit
        return out._replace(events=out.events | bit, past=out.past | bit)

    def new_product(self, eqn: Eqn) -> int:
        """Returns a bit for an equation that is, or may become, a product."""
        bit = self._bits.setdefault(eqn, 1 << len(self._bits))
        self.products[bit] = eqn
        return bit

    def _times(self, eqn: Eqn, inputs: list[Fact], out: Fact) -> Fact:
        (a, b), (x, y) = inputs, eqn.inputs()
        if a.is_deep and b.is_deep and x.var is not y.var:
            # After a sum it is a product of query and key, written out.
            out = out._replace(pairs=out.pairs | self.new_product(eqn))
        # A partial sum is rescaled before the next part is added.
        normalized = a.weights & b.sums & ~b.weights | b.weights & a.sums & ~a.weights
        normalized |= out.normalized
        return out._replace(normalized=normalized)

    def _sum(self, eqn: Eqn, inputs: list[Fact], out: Fact) -> Fact:
        """Returns the fact of a sum; a residual sum resets `writers`.

        In a residual sum one summand depends on the other; the later one's layers write
        the output.
        """
        is_sum = eqn.kind is Kind.SUM
        if is_sum and out.is_deep and _is_straight_through(self, eqn):
            out = out._replace(is_onehot=True)
        deep = [x for x in inputs if x.is_deep]
        shape = eqn.output().shape
        if len(deep) != 2 or math.prod(shape) == 1:
            return out  # one number is a sum of losses, not of layers
        is_difference = eqn.kind is Kind.DIFFERENCE
        if is_difference and all(x.shape != shape for x in eqn.inputs()):
            # Differences of all pairs: the sum of their squares contains a product.
            out = out._replace(pairs=out.pairs | self.new_product(eqn))
        # A sum of exponentials, computed piece by piece or trip by trip.
        one, other = (x.lone_exponentials for x in deep)
        if is_sum and one and other:
            out = out._replace(sums=out.sums | one | other)
        a, b = (x.writers for x in deep)
        # If no layer wrote a summand, all events before it count as its writers.
        is_after = self.before(a) & (b or deep[1].past)
        is_before = self.before(b) & (a or deep[0].past)
        if a == b or not (is_after or is_before):
            return out
        earlier = eqn.inputs()[inputs.index(deep[bool(is_after)])]
        writers = (b, a)[bool(is_after)]
        # The norm in a distance is one number for all outputs, possibly after a
        # parameter was added to it. Then no layer made the earlier summand.
        graph = self.graph
        sums = [x for x in graph.made_by(earlier) if x.kind is Kind.SUM]
        parts = [x for y in sums for x in y.inputs() if self.of(x).is_deep] or [earlier]
        is_one = (
            x.shape[-1:] in ((), (1,)) or len(shape) - 1 in graph.copied(x)
            for x in parts
        )
        return out._replace(writers=writers if all(is_one) else 0)

    def _total(self, eqn: Eqn, out: Fact) -> Fact:
        """Returns the fact of a sum along dimensions."""
        is_whole = len(eqn.output().shape) < len(eqn.inputs()[0].shape)
        if is_whole and out.pairs and not out.weights:
            out = out._replace(products=out.pairs, pairs=0)
        sums = out.sums | out.unnormalized
        return out._replace(sums=sums, weights=out.weights & out.normalized)

    def _mixed(self, eqn: Eqn, inputs: list[Fact]) -> Fact:
        """Returns the fact of several values that are combined entry by entry."""
        out = joined(inputs)
        if not out.leaves:
            return out
        if out.is_weight:
            return out._replace(
                is_shifted=out.is_shifted or self._is_shift(eqn, inputs)
            )
        weights = union(x.leaves for x in inputs if x.is_weight)
        deep = [x for x in inputs if x.is_deep]
        if (
            weights
            and not union(x.leaves for x in deep) & ~weights
            and eqn.kind in (Kind.PRODUCT, Kind.QUOTIENT)
            and self._is_of_norms(eqn, inputs)
        ):
            # A weight divided by its norm, computed with a vector from the arguments:
            # products in the norm are no uses of it. An activation that is scaled by
            # numbers computed from its weight, as for eight bits, is a use.
            self.norm_events |= union(x.events for x in deep)
            return out._replace(is_deep=False, has_data=True, events=0, writers=0)
        return self._register_event(eqn, out) if weights else out


def _is_row(eqn: Eqn) -> bool:
    """Whether indices pick rows of a table, not a slice or matrices, as experts are."""
    params, shape = eqn.jaxpr_eqn.params, eqn.inputs()[0].shape
    sizes = zip(params["slice_sizes"], shape, strict=True)
    return is_lookup(eqn) and sum(n == m > 1 for n, m in sizes) <= 1


def is_lookup(eqn: Eqn) -> bool:
    """Whether each of several indices picks entries of an array."""
    if eqn.name != "gather":
        return False
    numbers = eqn.jaxpr_eqn.params["dimension_numbers"]
    return len(numbers.offset_dims) < len(eqn.output().shape)


def is_inexact(atom: Atom) -> bool:
    """Whether a variable has a gradient: it holds no integers, masks or keys."""
    return _is_inexact(atom.var.aval.dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def is_choice(eqn: Eqn, atom: Atom) -> bool:
    """Whether a value is a mask or an index, which selects entries.

    Other integers may be logits, as 8-bit products are.
    """
    is_order = eqn.kind in (Kind.ORDER, Kind.WINNER)
    is_index = is_order and not is_inexact(atom)
    return is_index or atom.var.aval.dtype == jnp.bool_


def _is_straight_through(facts: Facts, eqn: Eqn) -> bool:
    """Whether a sum is `x + (rows - x)`: one-hot rows with the gradient of `x`."""

    def makers(atom: Atom) -> list[Eqn]:
        """Returns the equations that made an array, past any `stop_gradient`."""
        eqns = facts.graph.made_by(atom)
        is_stopped = [x.kind for x in eqns] == [Kind.STOPPED]
        return makers(eqns[0].inputs()[0]) if is_stopped else eqns

    for x, y in (eqn.inputs(), eqn.inputs()[::-1]):
        for maker in makers(y):
            rows, *less = maker.inputs() if maker.kind is Kind.DIFFERENCE else [y]
            if less and facts.of(rows).is_onehot and makers(less[0]) == makers(x):
                return True
    return False


def _is_onehot(eqn: Eqn, inputs: list[Fact]) -> bool:
    """Whether rows have a single entry that is not 0: `index == arange(n)`."""
    rows = [x.is_onehot for x in inputs]
    if eqn.kind is Kind.EQUAL:
        return any(x.is_counter for x in inputs)
    if eqn.kind is Kind.CHOICE:
        pairs = zip(rows, eqn.inputs(), strict=True)
        cases = [is_one for is_one, atom in [*pairs][1:] if atom.number != 0]
        return rows[0] or (bool(cases) and all(cases))
    is_mask = (eqn.kind is Kind.PRODUCT or eqn.name == "and") and any(rows)
    return is_mask and any(not (x.is_deep or x.is_onehot) for x in inputs)

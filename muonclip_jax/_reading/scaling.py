"""The scales of an array: for each summand, the parameters that it is linear in.

To double an array, one factor of every summand has to double. QK-Clip needs no more, so
this is followed back no further than to the factor that a clip would choose: of
`W_b (W_a x)` to W_b, if its entries are of one head each.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .facts import Fact, Facts
from .graph import Atom, Eqn, Graph, Labels
from .jaxprs import names
from .labels import either, key_of
from .primitives import ELEMENTWISE, Move, moves, PRODUCTS


class Factor(NamedTuple):
    """A parameter that a summand is a product with, and what its entries are marked."""

    parameter: int
    labels: Labels
    # Where it met an activation, as a bit; 0 before.
    event: int = 0
    # It is the kernel of a product, and no gain, bias or table.
    is_kernel: bool = False
    # False after something nonlinear, such as the division of a norm: that says where
    # heads are, by the kernel's outputs, though only a gain after it can scale them.
    is_linear: bool = True
    # An index that is no counter of a loop picked entries.
    is_picked: bool = False


class Summand(NamedTuple):
    """A product of factors, the last that was applied first; `why` there is none."""

    factors: tuple[Factor, ...]
    why: str = ""

    @property
    def linear(self) -> list[Factor]:
        return [f for f in self.factors if f.is_linear]


Sum = tuple[Summand, ...]

# Longer sums are followed no further. A clip needs one factor for each summand: a
# projection, its bias, an adapter's product, for each of few sources.
_MOST_SUMMANDS = 12

#: Whether a kernel is followed no further, by its labels and its operand's.
IsLast = Callable[[Labels, Labels], bool]


def never(kernel: Labels, other: Labels) -> bool:
    return False


# So many products are multiplied out on the way to what made an activation.
_DEEPEST = 4

# So many equations, one after another: each is a few calls deep.
_LONGEST = 80

ADDED = "data or constants are added to"
SHIFTED = "a number is added to a parameter, as in a norm's gain of 1 + g, of"
NORMED = (
    "something nonlinear, such as a norm without a gain, stands between the parameters "
    "and"
)


class Way(NamedTuple):
    """How far an array was followed back, and with what."""

    labels: Labels
    seen: frozenset[Any] = frozenset()  # what loops carry that it came through
    depth: int = 0  # products that were multiplied out
    steps: int = 0  # equations
    deepest: int = _DEEPEST
    is_last: IsLast = never


class Scaling:
    """Follows arrays back to the factors of their summands."""

    def __init__(self, graph: Graph, facts: Facts):
        self._graph, self._facts = graph, facts
        self._known: dict[Any, Sum] = {}

    def of(
        self,
        atom: Atom,
        labels: Labels,
        is_last: IsLast = never,
        deepest: int = _DEEPEST,
    ) -> Sum:
        """The summands of an array.

        `is_last` judges a kernel by its labels and those of what it is applied to,
        which is then not followed, nor what more than `deepest` products were before.
        """
        # What is known is of these labels, and of where to stop. Within one call it is
        # needed: a residual stream would be gone through once for each way to it.
        self._known = {}
        return self._of(atom, Way(labels, is_last=is_last, deepest=deepest))

    def _of(self, atom: Atom, way: Way) -> Sum:
        key = atom, way.depth, *map(key_of, way.labels)
        if key not in self._known:
            found: list[Summand] = []
            if way.steps > _LONGEST:
                return (Summand((), "it was followed too far back through"),)
            for origin in self._graph.origins(atom, way.labels, way.seen):
                if origin.parameter is not None:
                    found.append(Summand((Factor(origin.parameter, origin.labels),)))
                elif origin.at is not None:
                    labels, seen = origin.labels, origin.seen
                    after = way._replace(labels=labels, seen=seen, steps=way.steps + 1)
                    found += self._equation(origin.at, origin.k, after)
                elif origin.atom is not None and not origin.atom.is_zero:
                    found.append(Summand((), ADDED))
            self._known[key] = summed(found)
        return self._known[key]

    def _equation(self, at: Eqn, k: int, way: Way) -> Iterable[Summand]:
        inputs, facts, name = at.inputs(), self._facts.inputs(at), at.name
        why = (
            f"{name} at {at.line}, which is not linear, stands between the parameters "
            "and"
        )
        if not self._facts.of(at.output(k)).leaves:
            return [] if at.output(k).number == 0 else [Summand((), ADDED)]
        back = dict(moves(at, k))
        if not back:
            return [Summand((), why)]
        if name in ("mul", "div", *PRODUCTS):
            return self._product(at, facts, back, way)
        if name in ELEMENTWISE:
            # The norm of an axis, a clamp: no factor of what is left scales it.
            made = (self._operand(at, i, back[i], way) for i in back if facts[i].leaves)
            why = NORMED if name in _OF_NORMS else why
            return [unscaled([s for x in made for s in x], why)]
        taken = self._finite_case(at) if name == "select_n" else None
        found: list[Summand] = []
        for i, move in back.items():
            if (taken is None or i == taken) and not inputs[i].is_zero:
                own = self._operand(at, i, move, way)
                if own and not facts[i].leaves:
                    is_shift = any(fact.is_weight for fact in facts)
                    if name in ("max", "min"):
                        own = (Summand((), why),)
                    elif is_shift and not facts[i].has_data and name in ("add", "sub"):
                        own = (Summand((), SHIFTED),)
                found += self._met(at, facts[i], own)
        return found

    def _operand(self, at: Eqn, i: int, move: Move, way: Way) -> Sum:
        own = way._replace(labels=tuple(map(move, way.labels)))
        found = self._of(at.inputs()[i], own)
        # Of a table of positions all rows are meant, of a stack of kernels one.
        is_stack = i == 0 and self._facts.of(at.output()).is_weight
        if at.name in ("dynamic_slice", "gather") and is_stack and _is_any(at):
            return changed(found, is_picked=True)
        return found

    def _met(self, at: Eqn, fact: Fact, found: Sum, is_kernel: bool = False) -> Sum:
        """Marks factors that were a parameter up to here with this equation."""
        event = self._facts.event(at)
        if not (fact.is_weight and (event or is_kernel)):
            return found

        def of(f: Factor) -> Factor:
            is_one = f.is_kernel or is_kernel
            return f._replace(event=f.event or event, is_kernel=is_one)

        return tuple(s._replace(factors=tuple(map(of, s.factors))) for s in found)

    def _product(
        self, at: Eqn, facts: list[Fact], back: dict[int, Move], way: Way
    ) -> Iterable[Summand]:
        """Of both operands every summand with every other's."""
        is_matrix, is_quotient = at.name in PRODUCTS, at.name == "div"

        def side(i: int, deeper: int = 0) -> Sum:
            own = way._replace(depth=way.depth + deeper)
            found = self._operand(at, i, back[i], own)
            found = self._met(at, facts[i], found, is_matrix and facts[i].is_weight)
            if is_quotient and i == 1:
                return (unscaled(found, NORMED),)
            other = facts[1 - i]
            return tuple(_apart(s, other) for s in found) if other.leaves else found

        if not (facts[0].leaves and facts[1].leaves):
            return side(0 if facts[0].leaves else 1)
        if is_quotient:
            return side(0)
        # The weight first: it was applied last, as B is in x @ (A @ B).
        is_weight = [fact.is_weight for fact in facts[:2]]
        is_second = is_weight[1] and (is_matrix or not is_weight[0])
        one, two = (1, 0) if is_second else (0, 1)
        first = side(one)
        if is_weight[one] and is_matrix and first and all(s.linear for s in first):
            other = tuple(map(back[two], way.labels))
            if all(way.is_last(s.linear[0].labels, other) for s in first):
                return first
        # A norm's other side is made of nothing else than what it norms.
        is_norm = not (
            facts[two].events & ~facts[one].events
            or facts[two].leaves & ~facts[one].leaves
        )
        if (is_norm and not is_weight[one]) or way.depth >= way.deepest:
            return first
        second = side(two, deeper=1)
        # Each summand needs one factor alone: either side has one for all of them.
        if len(first) * len(second) > 2 * _MOST_SUMMANDS:
            return first if len(first) <= len(second) else second
        pairs = itertools.product(first, second)
        return [Summand((*x.factors, *y.factors), x.why or y.why) for x, y in pairs]

    def _finite_case(self, at: Eqn) -> int | None:
        """Of `where(isnan(x), 0, x)` and such, the case that finite entries have: x."""
        # `select_n` has the case for False first, after the test itself.
        made = self._graph.made_by(at.inputs()[0])
        if len(made) != 1 or len(at.eqn.invars) != 3:
            return None
        test, args = made[0], made[0].inputs()
        if test.name == "is_finite":
            return 2
        is_nan = test.name == "ne" and args[0] == args[1]
        is_infinite = test.name == "eq" and any(
            isinstance(x.number, float) and math.isinf(x.number) for x in args
        )
        return 1 if is_nan or is_infinite else None


def changed(found: Sum, **changes: Any) -> Sum:
    """The sum with all factors changed alike."""
    return tuple(
        s._replace(factors=tuple(f._replace(**changes) for f in s.factors))
        for s in found
    )


_OF_NORMS = names("rsqrt sqrt integer_pow square pow log logistic tanh")


def _apart(summand: Summand, other: Fact) -> Summand:
    """A factor scales a product if the other side does not change with it.

    Of `x * rsqrt(var(x))` the kernel that made x scales nothing.
    """

    def of(f: Factor) -> Factor:
        same = other.events & f.event if f.event else other.leaves >> f.parameter & 1
        return f._replace(is_linear=f.is_linear and not same)

    factors = tuple(map(of, summand.factors))
    is_lost = any(f.is_linear for f in summand.factors) and not any(
        f.is_linear for f in factors
    )
    return Summand(factors, NORMED if is_lost else summand.why)


def unscaled(summands: Iterable[Summand], why: str) -> Summand:
    """The rest of summands where nothing scales them: where their axes are."""
    summands = list(summands)
    found: dict[Any, Factor] = {}
    for s in summands:
        for f in s.factors:
            key = f.parameter, f.event
            found[key] = _joined(found[key], f) if key in found else f
    factors = tuple(f._replace(is_linear=False) for f in found.values())
    reasons = [s.why for s in summands if s.why and s.why != ADDED]
    return Summand(factors, reasons[0] if reasons else why)


def summed(summands: Iterable[Summand]) -> Sum:
    """A sum, with the summands of the same factors as one."""
    found: dict[Any, Summand] = {}
    for s in summands:
        key = (
            # Those that a mean was taken of are no less along an axis for it.
            tuple((*f[0:1], *f[2:5], _axes(f.labels)) for f in s.factors),
            s.why if not s.factors else "",
        )
        if key in found:
            pairs = zip(found[key].factors, s.factors, strict=True)
            s = Summand(tuple(_joined(*pair) for pair in pairs), s.why)
        found[key] = s
    if len(found) > _MOST_SUMMANDS:
        return (unscaled(found.values(), "a sum of too many summands made"),)
    return tuple(found.values())


def _axes(labels: Labels) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(n > 1 for n in label.shape) for label in labels)


def _joined(a: Factor, b: Factor) -> Factor:
    labels = tuple(either(x, y) for x, y in zip(a.labels, b.labels, strict=True))
    return b._replace(
        labels=labels,
        is_linear=a.is_linear and b.is_linear,
        is_kernel=a.is_kernel or b.is_kernel,
        is_picked=a.is_picked or b.is_picked,
    )


def _is_any(at: Eqn) -> bool:
    """Whether an index, unknown which, picks one entry of a parameter."""
    of, *starts = at.inputs()
    if at.name == "gather":
        return starts[0].number is None
    dims = zip(at.output().shape, of.shape, starts, strict=True)
    return any(n == 1 < m and x.number is None for n, m, x in dims)

"""Finds how to scale an array: the parameters in which each summand is linear.

To double an array, one factor of every summand has to double. QK-Clip needs no more, so
the search stops at the factor that a clip would choose. In `W_b (W_a x)` it stops at
`W_b` if each entry of `W_b` belongs to one head.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .back import Move
from .fact import Fact
from .facts import Facts
from .graph import AllMarks, Atom, Eqn, Graph
from .indexing import index_of
from .marks import is_disjoint, key_of, total, union_of
from .primitives import Kind, moves


class Factor(NamedTuple):
    """A parameter among the factors of a summand, with the marks of its entries."""

    parameter: int
    all_marks: AllMarks
    event: int = 0  # the bit of the equation where it met an activation; 0 before
    is_kernel: bool = False  # the kernel of a product, not a gain, bias or table
    # False after something nonlinear, such as the division in a norm. The outputs of
    # the kernel still show where heads are, but only a gain after it can scale them.
    is_linear: bool = True
    # An index picked entries, and the index is not a loop counter.
    is_picked: bool = False


class Summand(NamedTuple):
    """A product of factors, last applied first; `why` says why it has none."""

    factors: tuple[Factor, ...]
    why: str = ""

    @property
    def linear(self) -> list[Factor]:
        return [f for f in self.factors if f.is_linear]

    def changed(self, change: Callable[[Factor], Factor]) -> "Summand":
        return self._replace(factors=tuple(map(change, self.factors)))


Sum = tuple[Summand, ...]

# The search gives up on longer sums. A clip needs one factor for each summand, and
# attention has few: a projection, its bias, an adapter's product, for each source.
# Arrays that are put together, as separate layers are, make no long sum, since each
# entry has the summands of one array: such a sum may have up to `_MOST_APART`.
_MOST_SUMMANDS = 12
_MOST_APART = 1 << 13

#: Returns whether the search stops at a kernel, from its marks and its operand's.
IsLast = Callable[[AllMarks, AllMarks], bool]


def never(kernel: AllMarks, other: AllMarks) -> bool:
    return False


# The most equations in a row: the search recurses a few calls deep at each.
_LONGEST = 80

_SUMS = (Kind.SUM, Kind.DIFFERENCE)

ADDED = "data or constants are added to"
SLOPE = "a gradient, as in an inner step of training, is added to"
SHIFTED = "a number is added to a parameter, as in a norm's gain of 1 + g, of"
NORMED = (
    "something nonlinear, such as a norm without a gain, stands between the parameters "
    "and"
)


class Walk(NamedTuple):
    """How far an array was followed back, with which marks and limits."""

    all_marks: AllMarks
    seen: frozenset[Any] = frozenset()  # the loop carries that it passed through
    steps: int = 0  # equations
    is_last: IsLast = never


class Scaling:
    """Follows arrays back to the factors of their summands."""

    def __init__(self, graph: Graph, facts: Facts):
        self._graph, self._facts = graph, facts
        self._sums: dict[Any, Sum] = {}

    def of(self, atom: Atom, all_marks: AllMarks, is_last: IsLast = never) -> Sum:
        """Returns the summands of an array.

        `is_last` receives the marks of a kernel and of its operand. If it returns
        true, the search does not follow the operand.
        """
        # Sums hold for these marks and `is_last` only, so each call starts without any.
        # Within a call they are kept: else a residual stream would be followed once for
        # each route to it.
        self._sums = {}
        return self._of(atom, Walk(all_marks, is_last=is_last))

    def _of(self, atom: Atom, walk: Walk) -> Sum:
        key = atom, *map(key_of, walk.all_marks)
        if key not in self._sums:
            summands: list[Summand] = []
            if walk.steps > _LONGEST:
                return (Summand((), "it was followed too far back through"),)
            for origin in self._graph.origins(atom, walk.all_marks, walk.seen):
                all_marks = origin.all_marks
                if origin.parameter is not None:
                    summands.append(Summand((Factor(origin.parameter, all_marks),)))
                elif origin.eqn is not None:
                    next_walk = walk._replace(
                        all_marks=all_marks, seen=origin.seen, steps=walk.steps + 1
                    )
                    summands += self._equation(origin.eqn, origin.k, next_walk)
                elif origin.atom is not None and not origin.atom.is_zero:
                    summands.append(Summand((), ADDED))
            self._sums[key] = summed(summands)
        return self._sums[key]

    def _equation(self, eqn: Eqn, k: int, walk: Walk) -> Iterable[Summand]:
        inputs, facts, kind = eqn.inputs(), self._facts.inputs(eqn), eqn.kind
        why = (
            f"{eqn.name} at {eqn.line}, which is not linear, stands between the "
            "parameters and"
        )
        if not self._facts.of(eqn.output(k)).leaves:
            is_zero = eqn.output(k).number == 0
            return [] if is_zero else [Summand((), self._added(eqn.output(k)))]
        back = dict(moves(eqn, k))
        if not back:
            return [Summand((), why)]
        if kind in (Kind.PRODUCT, Kind.QUOTIENT, Kind.CONTRACTION):
            return self._product(eqn, facts, back, walk)
        if kind.is_bent:
            # A nonlinear function such as a norm or a clamp: no factor scales it.
            sums = (
                self._operand(eqn, i, back[i], walk) for i in back if facts[i].leaves
            )
            return [unscaled([s for x in sums for s in x], why)]
        finite_case = self._finite_case(eqn) if kind is Kind.CHOICE else None
        summands: list[Summand] = []
        for i, move in back.items():
            if (finite_case is None or i == finite_case) and not inputs[i].is_zero:
                terms = self._operand(eqn, i, move, walk)
                if terms and not facts[i].leaves:
                    is_shift = any(fact.is_weight for fact in facts)
                    if kind is Kind.LARGER:
                        terms = (Summand((), why),)
                    elif is_shift and not facts[i].has_data and kind in _SUMS:
                        terms = (Summand((), SHIFTED),)
                summands += self._note_event(eqn, facts[i], terms)
        return summands

    def _added(self, atom: Atom) -> str:
        """Returns what an array without parameters is, as a reason."""
        if atom.var.aval.dtype.kind != "f":
            return ADDED

        def follow(eqn: Eqn, k: int) -> Iterable[int]:
            return () if eqn.is_slope else range(len(eqn.inputs()))

        origins = self._graph.walk(atom, atom.whole, follow)
        return SLOPE if any(x.eqn and x.eqn.is_slope for x in origins) else ADDED

    def _operand(self, eqn: Eqn, i: int, move: Move, walk: Walk) -> Sum:
        next_walk = walk._replace(all_marks=tuple(map(move, walk.all_marks)))
        summands = self._of(eqn.inputs()[i], next_walk)
        if self._facts.of(eqn.output()).is_weight and _has_unknown_index(eqn, i):
            picked = (s.changed(lambda f: f._replace(is_picked=True)) for s in summands)
            return tuple(picked)
        return summands

    def _note_event(
        self, eqn: Eqn, fact: Fact, summands: Sum, is_kernel: bool = False
    ) -> Sum:
        """Notes this equation in the factors that were still a parameter here."""
        event = self._facts.event(eqn)
        if not (fact.is_weight and (event or is_kernel)):
            return summands

        def noted(f: Factor) -> Factor:
            is_one = f.is_kernel or is_kernel
            return f._replace(event=f.event or event, is_kernel=is_one)

        return tuple(s.changed(noted) for s in summands)

    def _product(
        self, eqn: Eqn, facts: list[Fact], back: dict[int, Move], walk: Walk
    ) -> Iterable[Summand]:
        """Multiplies each summand of one operand with each summand of the other."""
        is_matrix = eqn.kind is Kind.CONTRACTION
        is_quotient = eqn.kind is Kind.QUOTIENT

        def side(i: int) -> Sum:
            summands = self._operand(eqn, i, back[i], walk)
            summands = self._note_event(
                eqn, facts[i], summands, is_matrix and facts[i].is_weight
            )
            if is_quotient and i == 1:
                return (unscaled(summands, NORMED),)
            if not (other := facts[1 - i]).leaves:
                return summands
            return tuple(_apart(s, other) for s in summands)

        if not (facts[0].leaves and facts[1].leaves):
            return side(0 if facts[0].leaves else 1)
        if is_quotient:
            return side(0)
        # The weight comes first because it was applied last, like B in x @ (A @ B).
        is_weight = [fact.is_weight for fact in facts[:2]]
        is_second = is_weight[1] and (is_matrix or not is_weight[0])
        one, two = (1, 0) if is_second else (0, 1)
        first = side(one)
        if is_weight[one] and is_matrix and first and all(s.linear for s in first):
            other = tuple(map(back[two], walk.all_marks))
            if all(walk.is_last(s.linear[0].all_marks, other) for s in first):
                return first
        # The factor of a norm depends on nothing but the array that it normalizes.
        is_norm = not (
            facts[two].events & ~facts[one].events
            or facts[two].leaves & ~facts[one].leaves
        )
        if is_norm and not is_weight[one]:
            return first
        second = side(two)
        pairs = list(itertools.product(first, second))
        if 2 * _MOST_SUMMANDS < len(pairs) <= _MOST_APART:
            sides = [[(x, _groups(x)) for x in terms] for terms in (first, second)]
            both = itertools.product(*sides)
            pairs = [(x, y) for (x, a), (y, b) in both if not _are_apart(a, b)]
        products = [Summand((*x.factors, *y.factors), x.why or y.why) for x, y in pairs]
        # Each summand needs only one factor, and either side has one for all of them.
        if _is_long(products, 2 * _MOST_SUMMANDS):
            return first if len(first) <= len(second) else second
        return products

    def _finite_case(self, eqn: Eqn) -> int | None:
        """Returns the operand of finite entries, as x in `where(isnan(x), 0, x)`."""
        # The operands of `select_n` are the condition, the case for False, for True.
        eqns = self._graph.made_by(eqn.inputs()[0])
        if len(eqns) != 1 or len(eqn.jaxpr_eqn.invars) != 3:
            return None
        test, args = eqns[0], eqns[0].inputs()
        if test.name == "is_finite":
            return 2
        is_nan = test.name == "ne" and args[0] == args[1]
        is_infinite = test.kind is Kind.EQUAL and any(
            isinstance(x.number, float) and math.isinf(x.number) for x in args
        )
        return 1 if is_nan or is_infinite else None


def _apart(summand: Summand, other: Fact) -> Summand:
    """Marks factors as not linear if the other side of a product changes with them.

    In `x * rsqrt(var(x))`, the kernel that made `x` does not scale the product.
    """

    def judged(f: Factor) -> Factor:
        same = other.events & f.event if f.event else other.leaves >> f.parameter & 1
        return f._replace(is_linear=f.is_linear and not same)

    result = summand.changed(judged)
    is_lost = summand.linear and not result.linear
    return result._replace(why=NORMED) if is_lost else result


def unscaled(summands: Iterable[Summand], why: str) -> Summand:
    """Returns one summand without linear factors, which still shows where axes are."""
    summands = list(summands)
    merged: dict[Any, Factor] = {}
    for s in summands:
        for f in s.factors:
            key = f.parameter, f.event
            merged[key] = _joined(merged[key], f) if key in merged else f
    factors = tuple(f._replace(is_linear=False) for f in merged.values())
    reasons = [s.why for s in summands if s.why not in ("", ADDED)]
    return Summand(factors, reasons[0] if reasons else why)


def summed(summands: Iterable[Summand]) -> Sum:
    """Returns a sum in which summands with the same factors are merged."""
    merged: dict[Any, Summand] = {}
    for s in summands:
        # Merging x with mean(x) would hide along which axes the marks of x vary.
        axes = ([n > 1 for x in f.all_marks for n in x.shape] for f in s.factors)
        factors = ((f[0], *f[2:5], *x) for f, x in zip(s.factors, axes, strict=True))
        key = tuple(factors) or s.why
        if key in merged:
            pairs = zip(merged[key].factors, s.factors, strict=True)
            s = Summand(tuple(_joined(*pair) for pair in pairs), s.why)
        merged[key] = s
    if _is_long([*merged.values()], _MOST_SUMMANDS):
        return (unscaled(merged.values(), "a sum of too many summands made"),)
    return tuple(merged.values())


#: The factors of a summand, each with the union of its marks and whether it is exact. A
#: summand has the entries that all groups have; a group, those of any of its factors.
_Groups = list[list[list[tuple[int, bool]]]]


def _groups(summand: Summand) -> _Groups:
    factors = [
        [(total(x), x.dtype.kind == "O") for x in f.all_marks]
        for f in summand.linear or summand.factors
    ]
    # After something nonlinear, such as a norm of several kernels that are put
    # together, factors need not meet.
    return [[x] for x in factors] if summand.linear else [factors] if factors else []


def _are_apart(a: _Groups, b: _Groups) -> bool:
    """Whether no entry of the result has both summands."""

    def is_apart(x: list[tuple[int, bool]], y: list[tuple[int, bool]]) -> bool:
        pairs = zip(x, y, strict=True)
        return any(is_disjoint(m, n, is_exact) for (m, is_exact), (n, _) in pairs)

    both = itertools.product(a, b)
    return any(all(is_apart(x, y) for x in one for y in two) for one, two in both)


def _is_long(summands: Sequence[Summand], most: int) -> bool:
    """Whether some summand may meet more than a number of others in one entry."""
    if len(summands) <= most or len(summands) > _MOST_APART:
        return len(summands) > most
    groups = [*map(_groups, summands)]
    return any(sum(not _are_apart(x, y) for y in groups) > most for x in groups)


def _joined(a: Factor, b: Factor) -> Factor:
    all_marks = tuple(
        union_of(x, y) for x, y in zip(a.all_marks, b.all_marks, strict=True)
    )
    return b._replace(
        all_marks=all_marks,
        is_linear=a.is_linear and b.is_linear,
        is_kernel=a.is_kernel or b.is_kernel,
        is_picked=a.is_picked or b.is_picked,
    )


def _has_unknown_index(eqn: Eqn, i: int) -> bool:
    """Returns whether an unknown index says where a parameter's entries are.

    An index picks one kernel of a stack, or some, but reads all rows of a table of
    positions. In an array that is updated it says where the parameter goes.
    """
    operand, *others = eqn.inputs()
    if eqn.name == "gather" and i == 0:
        return index_of(eqn) is None
    if eqn.name.startswith("scatter") and i == 2:
        return others[0].value is None
    is_update = eqn.name == "dynamic_update_slice" and i == 1
    if not is_update and (eqn.name != "dynamic_slice" or i):
        return False
    starts, cut = (others[1:], others[0]) if is_update else (others, eqn.output())
    dims = zip(cut.shape, operand.shape, starts, strict=True)
    is_stack = len(operand.shape) > 2
    return any((n == 1 or is_stack) and n < m and x.value is None for n, m, x in dims)

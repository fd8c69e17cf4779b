"""What scales an array: for each of its summands, the parameters that it is linear in.

To double an array, one factor of every summand has to double. QK-Clip needs no more, so
this is followed back no further than to the factor that a clip would choose: of
`W_b (W_a x)` to W_b, if its entries are of one head each.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from . import jaxprs
from .facts import Fact, Facts
from .graph import Atom, Eqn, Graph, Labels
from .labels import either, ELEMENTWISE, moves, PRODUCTS


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

ADDED = "data or constants are added to"
NORMED = "something nonlinear, such as a norm without a gain, stands between the parameters and"


class Scaling:
    """Follows arrays back to the factors of their summands."""

    def __init__(self, graph: Graph, facts: Facts):
        self._graph, self._facts = graph, facts
        self._known: dict[Any, Sum] = {}

    def of(self, atom: Atom, labels: Labels, is_last: IsLast = never) -> Sum:
        """The summands of an array; what kernels that are the last are applied to, is not followed.

        `is_last` judges a kernel by its labels and those of what it is applied to.
        """
        self._known = {}
        return self._of(atom, labels, frozenset(), 0, is_last)

    def _of(
        self, atom: Atom, labels: Labels, seen: Any, depth: int, is_last: IsLast
    ) -> Sum:
        key = (
            *atom.key(),
            depth,
            *((x.shape, x.dtype.kind, tuple(x.ravel().tolist())) for x in labels),
        )
        if key not in self._known:
            found: list[Summand] = []
            for origin, after in self._graph.origins(atom, labels, seen):
                if origin.parameter is not None:
                    found.append(Summand((Factor(origin.parameter, origin.labels),)))
                elif origin.at is not None:
                    found += self._equation(
                        origin.at, origin.k, origin.labels, after, depth, is_last
                    )
                elif origin.atom is not None and not origin.atom.is_zero:
                    found.append(Summand((), ADDED))
            self._known[key] = summed(found)
        return self._known[key]

    def _equation(
        self, at: Eqn, k: int, labels: Labels, seen: Any, depth: int, is_last: IsLast
    ) -> Iterable[Summand]:
        inputs, facts, name = at.inputs(), self._facts.all_of(at.inputs()), at.name
        out = self._facts.of(at.output(k))
        if not out.leaves:
            is_zero = at.frame.number(at.output(k).var) == 0
            return [] if is_zero else [Summand((), ADDED)]
        back = moves(at, k)
        follow = functools.partial(
            self._operand, at, back, labels, seen, depth, is_last
        )
        if name in PRODUCTS or name in ("mul", "div"):
            return self._product(at, facts, follow, is_last, depth, back, labels)
        if not back:
            return [Summand((), f"{name} at {at.line} is not linear, which made")]
        if name in ELEMENTWISE:
            # The norm of an axis, a clamp: no factor of what is left scales it.
            made = [s for i, _ in back if facts[i].leaves for s in follow(i)]
            why = (
                NORMED
                if name in _OF_NORMS
                else f"{name} at {at.line} is not linear, which made"
            )
            return [unscaled(made, why)]
        taken = _finite_case(at) if name == "select_n" else None
        found: list[Summand] = []
        for i, _ in back:
            if (taken is None or i == taken) and not inputs[i].is_zero:
                found += self._met(at, facts[i], follow(i))
        return found

    def _operand(self, at, back, labels, seen, depth, is_last, i, deeper=0) -> Sum:
        move = next(move for j, move in back if j == i)
        own = tuple(map(move, labels))
        found = self._of(at.inputs()[i], own, seen, depth + deeper, is_last)
        if (
            at.name in ("dynamic_slice", "gather")
            and self._facts.of(at.inputs()[0]).is_weight
        ):
            if _is_any(at):
                found = tuple(
                    s._replace(
                        factors=tuple(f._replace(is_picked=True) for f in s.factors)
                    )
                    for s in found
                )
        return found

    def _met(self, at: Eqn, fact: Fact, found: Sum, is_kernel: bool = False) -> Sum:
        """Marks factors that were a parameter up to here with where they no longer are."""
        event = self._facts.event(at)
        if not (fact.is_weight and (event or is_kernel)):
            return found

        def of(f: Factor) -> Factor:
            return f._replace(
                event=f.event or event, is_kernel=f.is_kernel or is_kernel
            )

        return tuple(s._replace(factors=tuple(map(of, s.factors))) for s in found)

    def _product(
        self,
        at: Eqn,
        facts: list[Fact],
        follow: Any,
        is_last: IsLast,
        depth: int,
        back: Any,
        labels: Labels,
    ) -> Iterable[Summand]:
        """Of both operands every summand with every other's."""
        is_matrix = at.name in PRODUCTS
        made = [i for i in (0, 1) if facts[i].leaves]
        if len(made) == 1:
            (i,) = made
            if at.name == "div" and i == 1:
                return [unscaled(follow(1), NORMED)]
            return self._met(at, facts[i], follow(i), is_matrix)
        # The weight first: it was applied last.
        one, two = (1, 0) if facts[1].is_weight and not facts[0].is_weight else (0, 1)
        if is_matrix and facts[0].is_weight and facts[1].is_weight:
            one, two = (1, 0)  # as in x @ (A @ B)

        def side(i: int) -> Sum:
            found = self._met(
                at,
                facts[i],
                follow(i, deeper=i == two),
                is_matrix and facts[i].is_weight,
            )
            if at.name == "div" and i == 1:
                return tuple(unscaled([s], NORMED) for s in found)
            return tuple(_apart(s, facts[1 - i]) for s in found)

        first = side(one)
        if (
            facts[one].is_weight
            and is_matrix
            and first
            and all(s.linear for s in first)
        ):
            move = next(move for j, move in back if j == two)
            other = tuple(map(move, labels))
            if all(is_last(s.linear[0].labels, other) for s in first):
                return first
        # A norm's other side is made of nothing else than what it norms.
        is_norm = not (
            facts[two].events & ~facts[one].events
            or facts[two].leaves & ~facts[one].leaves
        )
        if at.name == "div" or (is_norm and not facts[one].is_weight):
            return first if one == 0 or at.name != "div" else side(0)
        if depth >= _DEEPEST:
            return first
        second = side(two)
        if len(first) * len(second) > 2 * _MOST_SUMMANDS:
            return first if len(first) <= len(second) else second
        return [
            Summand((*x.factors, *y.factors), x.why or y.why)
            for x in first
            for y in second
        ]


_OF_NORMS = frozenset(
    ["rsqrt", "sqrt", "integer_pow", "square", "pow", "log", "logistic", "tanh"]
)


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
    """What remains of summands where nothing scales them: where their axes are."""
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


def _finite_case(at: Eqn) -> int | None:
    """Of `where(isnan(x), 0, x)` and such, the case that finite entries have: x."""
    frame, (mask, *cases) = at.frame, at.eqn.invars
    made = frame.made.get(mask) if not hasattr(mask, "val") else None
    if made is None or len(cases) != 2:
        return None
    test = frame.jaxpr.eqns[made[0]]
    name, args = test.primitive.name, test.invars
    if (
        name in ("jit", "pjit")
        and (body := jaxprs.called(test)) is not None
        and len(body.jaxpr.eqns) == 1
    ):
        (test,) = body.jaxpr.eqns
        name, args = test.primitive.name, test.invars
    if name == "is_finite":
        return 2
    is_nan = name == "ne" and args[0] is args[1]
    is_infinite = name == "eq" and any(
        hasattr(x, "val") and np.ndim(x.val) == 0 and np.isinf(x.val) for x in args
    )
    return 1 if is_nan or is_infinite else None


def _is_any(at: Eqn) -> bool:
    """Whether an index, unknown which, picks one entry of a parameter."""
    if at.name == "gather":
        return at.frame.number(at.eqn.invars[1]) is None
    new, old = jaxprs.shape_of(at.eqn.outvars[0]), jaxprs.shape_of(at.eqn.invars[0])
    return any(
        n == 1 < m and at.frame.number(x) is None
        for n, m, x in zip(new, old, at.eqn.invars[1:], strict=True)
    )

"""What an array of a trace is, in terms of the parameters."""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import pieces as pieces_
from .pieces import Pieces, Shape


class Kind(enum.IntEnum):
    """Whether an array was made of parameters alone, of data too, or of neither."""

    CONSTANT = 0
    PARAMETER = 1
    ACTIVATION = 2


class Source(NamedTuple):
    """What an array can be linear in.

    `"parameter"`, by its place among the leaves; `"logits"`, the product of two
    activations, and `"weights"`, what a softmax makes of it, by its place among those.
    """

    kind: str
    index: int


class Factor(NamedTuple):
    """A source that a term is linear in.

    **Arguments:**

    - `source`: of the entries.
    - `event`: where it met an activation, as a bit; 0 before. What was made behind that
        place has the bit in `Value.recent`.
    - `pieces`: where its entries lie in the array.
    - `is_linear`: `False` for a parameter that something nonlinear took before any
        activation met it: where its axes lie is known still.
    """

    source: Source
    event: int
    pieces: Pieces
    is_linear: bool = True


#: A product: doubling the entries of any one of its factors doubles it. Without a
#: factor it is what no parameter scales.
Term = tuple[Factor, ...]

#: A sum of them, with none equal to zero. To double it, one factor of each must double.
Terms = tuple[Term, ...]

UNSCALED: Terms = ((),)

# Sums of more products than these are followed no further. A clip needs one factor for
# each summand: a projection, its bias, an adapter's product, for each of few sources.
_MOST_TERMS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array of the trace.

    **Arguments:**

    - `kind`: see [`Kind`][].
    - `terms`: what it is linear in.
    - `past`: the events that it comes from, a bit each: the equations where a parameter
        met an activation, or two activations each other.
    - `recent`: those of them in the same trip of the innermost loop.
    - `ends`: the products with parameters since which no other came.
    - `gates`: the ends of what a softmax over outputs made into weights.
    - `is_spread`: a parameter that was copied along new dimensions, as tokens are.
    - `is_pair`: a product of two parameters.
    - `is_onehot`, `is_counter`: a comparison with 0, 1, 2, ..., and these numbers.
    """

    kind: Kind = Kind.CONSTANT
    terms: Terms = UNSCALED
    past: int = 0
    recent: int = 0
    ends: int = 0
    gates: int = 0
    is_spread: bool = False
    is_pair: bool = False
    is_onehot: bool = False
    is_counter: bool = False

    @property
    def is_deep(self) -> bool:
        """Whether it is an activation that parameters had a part in."""
        return self.kind == Kind.ACTIVATION and self.past != 0

    @property
    def sources(self) -> set[Source]:
        return {factor.source for term in self.terms for factor in term}

    def factors(self, kind: str = "parameter") -> list[Factor]:
        return [f for term in self.terms for f in term if f.source.kind == kind]

    def mapped(self, change: Callable[[Pieces], Pieces], **changes) -> "Value":
        """The value whose pieces are changed all alike."""
        terms = tuple(
            tuple(f._replace(pieces=change(f.pieces)) for f in term)
            for term in self.terms
        )
        return dataclasses.replace(self, terms=summed(terms), **changes)


CONSTANT = Value()
ZERO = Value(terms=())
DATA = Value(Kind.ACTIVATION)


def parameter(index: int, shape: Shape, kind: Kind = Kind.PARAMETER) -> Value:
    factor = Factor(Source("parameter", index), 0, pieces_.whole(shape))
    return Value(kind, ((factor,),))


def mixed(values: Iterable[Value], terms: Terms) -> Value:
    """What comes of several values, apart from what it is linear in."""
    values = list(values)
    past = recent = ends = gates = 0
    for v in values:
        past, recent = past | v.past, recent | v.recent
        ends, gates = ends | v.ends, gates | v.gates
    return Value(
        max((v.kind for v in values), default=Kind.CONSTANT),
        terms,
        past,
        recent,
        ends,
        gates,
        any(v.is_spread for v in values),
        any(v.is_pair for v in values),
    )


def summed(terms: Iterable[Term]) -> Terms:
    """A sum, with the terms of the same factors as one."""
    found: dict[tuple, list[Term]] = {}
    for term in terms:
        found.setdefault(tuple((f.source, f.event) for f in term), []).append(term)
    if len(found) > _MOST_TERMS:
        return UNSCALED
    return tuple(
        alike[0]
        if len(alike) == 1
        else tuple(
            Factor(
                same[0].source,
                same[0].event,
                pieces_.joined(*(f.pieces for f in same)),
                all(f.is_linear for f in same),
            )
            for same in zip(*alike, strict=True)
        )
        for alike in found.values()
    )


def multiplied(a: Value, b: Value) -> Terms:
    """The product of two values of one shape, multiplied out.

    A factor scales it if the other side does not change with it: of `x * rsqrt(var(x))`
    the kernel that made x scales nothing. What the other side has of the same trip of a
    loop tells, since each trip of a scanned layer has parameters of its own.
    """
    one, two = a.terms, b.terms
    if len(one) * len(two) > _MOST_TERMS:
        # The side with fewer summands is what a clip would scale.
        one, two = (one, two) if len(one) < len(two) else (two, one)
        two, (a, b) = UNSCALED, ((a, b) if one is a.terms else (b, a))

    def kept(term: Term, other: Value) -> Term:
        sources, factors = other.sources, []
        for f in term:
            if f.source.kind == "weights":
                factors.append(f)  # softmax divides them by their own sum
            elif f.event:
                if not other.recent & f.event:
                    factors.append(f)
            else:
                is_linear = f.is_linear and f.source not in sources
                factors.append(f._replace(is_linear=is_linear))
        return tuple(factors)

    return summed(
        tuple(
            sorted(
                {(f.source, f.event): f for f in (*kept(x, b), *kept(y, a))}.values(),
                key=lambda f: (f.event, f.source),
            )
        )
        for x, y in itertools.product(one, two)
    )


def nonlinear(values: Iterable[Value]) -> Terms:
    """What remains of terms behind a nonlinear function: of parameters, their axes."""
    values = list(values)
    if any(v.kind == Kind.ACTIVATION for v in values):
        return UNSCALED
    factors = {
        (f.source, f.event): f._replace(is_linear=False)
        for v in values
        for term in v.terms
        for f in term
    }
    return (tuple(factors.values()),)

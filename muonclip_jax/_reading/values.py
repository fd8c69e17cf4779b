"""What an array of a trace is, in terms of the parameters."""

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

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
    number: int


class Factor(NamedTuple):
    """A source that a term is linear in.

    **Arguments:**

    - `source`: of the entries.
    - `event`: where it met an activation, as a bit; 0 before. What was made behind that
        place has the bit in `Value.recent`.
    - `pieces`: where its entries lie in the array.
    - `is_linear`: `False` behind something nonlinear, such as the division of a norm.
        Where its axes lie is known still: heads are told apart by the kernel's outputs
        though only a gain behind the norm can scale them.
    - `scale`: what a softcap was multiplied with behind its tanh, if numbers alone.
    """

    source: Source
    event: int
    pieces: Pieces
    is_linear: bool = True
    scale: float = 1.0


#: A product: doubling the entries of any one of its linear factors doubles it. Without
#: such a factor it is what no parameter scales.
Term = tuple[Factor, ...]

#: A sum of them, with none equal to zero. To double it, one factor of each must double.
Terms = tuple[Term, ...]

UNSCALED: Terms = ((),)

# Sums of more products than these are followed no further. A clip needs one factor for
# each summand: a projection, its bias, an adapter's product, for each of few sources.
_MOST_TERMS = 12

# Factors of a term that are followed; a clip scales the last that tells heads apart.
_MOST_FACTORS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array of the trace.

    **Arguments:**

    - `kind`: see `Kind`.
    - `terms`: what it is linear in.
    - `past`: the events that it comes from, a bit each: the equations where a parameter
        met an activation, or two activations each other.
    - `recent`: those of them in the same trip of the innermost loop.
    - `ends`: the products with parameters since which no other came.
    - `gates`: the ends of what a softmax over outputs made into weights.
    - `is_spread`: a parameter that was copied along new dimensions, as tokens are.
    - `is_pair`: a product of two parameters.
    - `is_onehot`, `is_counter`: a comparison with 0, 1, 2, ..., and these numbers.
    - `number`: that all entries are known to be, as the index of `kernel[0]` is.
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
    number: int | float | bool | None = None

    @property
    def is_deep(self) -> bool:
        """Whether it is an activation that parameters had a part in."""
        return self.kind == Kind.ACTIVATION and self.past != 0

    @property
    def sources(self) -> set[Source]:
        return {factor.source for term in self.terms for factor in term}

    def factors(self, kind: str = "parameter") -> list[Factor]:
        return [f for term in self.terms for f in term if f.source.kind == kind]

    def mapped(self, change: Callable[[Pieces], Pieces], **changes: Any) -> "Value":
        """The value whose pieces are changed all alike; terms without any are zero."""
        terms = []
        for term in self.terms:
            new = tuple(f._replace(pieces=change(f.pieces)) for f in term)
            if all(f.pieces for f in new):
                terms.append(tuple(map(_if_few, new)))
        return dataclasses.replace(self, terms=summed(terms), **changes)

    def moved(
        self,
        to: Sequence[int | None],
        shape: Shape,
        loops: Mapping[int, int | None] = MappingProxyType({}),
        **changes: Any,
    ) -> "Value":
        return self.mapped(lambda p: pieces_.moved(p, to, shape, loops), **changes)

    def sliced(
        self, dim: int, start: int, size: int, stride: int, extent: int
    ) -> "Value":
        if (start, size, stride) == (0, extent, 1):
            return self
        return self.mapped(
            lambda p: pieces_.sliced(p, dim, start, size, stride, extent)
        )


CONSTANT = Value()
DATA = Value(Kind.ACTIVATION)


def parameter(index: int, shape: Shape, kind: Kind = Kind.PARAMETER) -> Value:
    factor = Factor(Source("parameter", index), 0, pieces_.whole(shape))
    return Value(kind, ((factor,),))


def constant(number: int | float | bool | None) -> Value:
    """One that is the same everywhere, if it is known; zero is no summand."""
    is_zero = number is not None and number == 0
    return Value(terms=() if is_zero else UNSCALED, number=number)


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
    """A sum, with the terms of the same factors as one, and so all without any."""
    terms = list(dict.fromkeys(terms))
    if len(terms) == 1:
        return tuple(terms)
    found: dict[tuple, list[Term]] = {}
    others: list[Term] = []
    for term in terms:
        key = tuple((f.source, f.event, f.is_linear) for f in term)
        if any(f.is_linear for f in term) and len(found) <= _MOST_TERMS:
            found.setdefault(key, []).append(term)
        else:
            others.append(term)
    if len(found) > _MOST_TERMS:
        return (unscaled(terms),)
    scaled = [
        alike[0]
        if len(alike) == 1
        else tuple(
            _if_few(same[0]._replace(pieces=pieces_.joined(*(f.pieces for f in same))))
            for same in zip(*alike, strict=True)
        )
        for alike in found.values()
    ]
    return (*scaled, unscaled(others)) if others else tuple(scaled)


def _if_few(factor: Factor) -> Factor:
    """The factor, which cannot be scaled where its entries are in too many places."""
    is_few = len(factor.pieces) <= pieces_.MOST_PIECES
    return factor if is_few else factor._replace(is_linear=False)


def unscaled(terms: Iterable[Term]) -> Term:
    """What remains of terms where nothing scales them: where axes lie."""
    factors = (f._replace(is_linear=False) for term in terms for f in term)
    return product_of(f for f in factors if f.source.kind == "parameter")


def nonlinear(values: Iterable[Value]) -> Terms:
    """A nonlinear function of values."""
    return (unscaled(term for v in values for term in v.terms),)


def multiplied(a: Value, b: Value) -> Terms:
    """The product of two values of one shape, multiplied out.

    A factor scales it if the other side does not change with it: of `x * rsqrt(var(x))`
    the kernel that made x scales nothing. What the other side has of the same trip of a
    loop tells, since each trip of a scanned layer has parameters of its own.
    """
    one, two = a.terms, b.terms
    if len(one) * len(two) > _MOST_TERMS:
        # The side with fewer summands is what a clip would scale.
        if len(one) < len(two):
            two = (unscaled(two),)
        else:
            one = (unscaled(one),)

    def kept(term: Term, other: Value) -> Iterator[Factor]:
        sources = other.sources
        for f in term:
            if f.source.kind == "capped":
                by = math.nan if other.number is None else other.number
                yield f._replace(scale=f.scale * by)
            elif f.source.kind == "weights":
                yield f  # softmax divides them by their own sum
            elif other.recent & f.event if f.event else f.source in sources:
                yield f._replace(is_linear=False)
            else:
                yield f

    return summed(
        product_of((*kept(x, b), *kept(y, a))) for x, y in itertools.product(one, two)
    )


def product_of(factors: Iterable[Factor]) -> Term:
    """A term in its only order, by event, with each factor once."""
    found: dict[tuple[Source, int], Factor] = {}
    for f in factors:
        same = found.get((f.source, f.event))
        if same:
            f = f._replace(
                pieces=pieces_.joined(same.pieces, f.pieces),
                is_linear=same.is_linear and f.is_linear,
            )
        found[f.source, f.event] = f
    ordered = sorted(found.values(), key=lambda f: (f.event, f.source))
    return tuple(ordered[-_MOST_FACTORS:])

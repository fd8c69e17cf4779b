"""What an array of a trace is, in terms of the parameters.

An array is known as a sum of products, each of whose factors is linear in one source: a
parameter, or the logits of attention. Doubling a factor doubles its product, which is
all that QK-Clip needs to know; a factor that something nonlinear was made of is kept
without that claim, for where its axes are.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .pieces import (
    Change,
    joined,
    MOST_PIECES,
    moved,
    NO_LOOPS,
    Pieces,
    reshaped,
    Shape,
    sliced,
    whole,
)


class Kind(enum.IntEnum):
    """Whether an array was made of parameters alone, of data too, or of neither."""

    CONSTANT = 0
    PARAMETER = 1
    ACTIVATION = 2


class Source(NamedTuple):
    """What an array can be linear in.

    `"parameter"`, by its place among the leaves; by the place of their product among
    those of activations: `"logits"`, `"capped"`, what a softcap's tanh makes of them,
    `"weights"`, what the exponential of a softmax does, and `"maxima"`, which a fused
    kernel gives next to its output.
    """

    kind: str
    number: int


class Factor(NamedTuple):
    """A source that a term is linear in."""

    source: Source
    # The place where it met an activation, as a bit; 0 before.
    event: int
    pieces: Pieces
    # False after something nonlinear, such as the division of a norm. Where its axes
    # are still tells heads apart, by the kernel's outputs, though only a gain after the
    # norm can scale them.
    is_linear: bool = True
    # What a softcap was multiplied with after its tanh, if numbers alone; else NaN.
    scale: float = 1.0


#: A product: doubling the entries of any one of its linear factors doubles it.
Term = tuple[Factor, ...]

#: A sum of them, with none equal to zero. To double it, one factor of each must double.
Terms = tuple[Term, ...]

UNSCALED: Terms = ((),)

# Longer sums are followed no further. A clip needs one factor for each summand: a
# projection, its bias, an adapter's product, for each of few sources.
_MOST_TERMS = 12

# Factors of a term that are followed; a clip scales the last that tells heads apart.
_MOST_FACTORS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An array of the trace."""

    kind: Kind = Kind.CONSTANT
    terms: Terms = UNSCALED
    # The events it comes from, a bit each: the equations where a parameter met an
    # activation, or two activations each other. `recent` are those in the same trip of
    # the innermost loop, `ends` the products with parameters since which no other came.
    past: int = 0
    recent: int = 0
    ends: int = 0
    # The ends of what a softmax over outputs made into weights, as a router's.
    gates: int = 0
    # A parameter that was copied along new dimensions, as tokens are.
    is_spread: bool = False
    # A product of two parameters.
    is_pair: bool = False
    # A comparison with 0, 1, 2, ..., and these numbers.
    is_onehot: bool = False
    is_counter: bool = False
    # The loop whose trips it counts.
    trip: int | None = None
    # What all entries are known to be, as the index of `kernel[0]` is.
    number: int | float | bool | None = None
    # The kernel whose outputs alone these are, up to what each goes through by itself;
    # -1 for those of several, `None` for what no kernel made.
    sole: int | None = None

    @property
    def is_deep(self) -> bool:
        """Whether it is an activation that parameters had a part in."""
        return self.kind == Kind.ACTIVATION and self.past != 0

    def factors(self, kind: str = "parameter") -> list[Factor]:
        return [f for term in self.terms for f in term if f.source.kind == kind]

    def mapped(self, change: Change, **changes: Any) -> "Value":
        """The value whose pieces are changed all alike; terms without any are zero."""
        terms = []
        for term in self.terms:
            new = tuple(f._replace(pieces=change(f.pieces)) for f in term)
            if all(f.pieces for f in new):
                terms.append(tuple(map(_if_few, new)))
        return dataclasses.replace(self, terms=summed(terms), **changes)

    def moved(
        self, to: Sequence[int | None], shape: Shape, loops=NO_LOOPS, **changes: Any
    ) -> "Value":
        return self.mapped(lambda p: moved(p, to, shape, loops), **changes)

    def reshaped(self, old: Shape, new: Shape) -> "Value":
        return self.mapped(lambda p: reshaped(p, old, new))

    def sliced(self, dim: int, start: int, size: int) -> "Value":
        return self.mapped(lambda p: sliced(p, dim, start, size))


CONSTANT = Value()
DATA = Value(Kind.ACTIVATION)


def parameter(index: int, shape: Shape, kind: Kind = Kind.PARAMETER) -> Value:
    factor = Factor(Source("parameter", index), 0, whole(shape))
    return Value(kind, ((factor,),))


def constant(number: Any) -> Value:
    """A number, if it is known; zero is no summand."""
    # So what is padded or masked with zeros is as linear as it was. With -1e9 it has a
    # summand that nothing scales, of which only the softmax's own logits are followed.
    if not isinstance(number, bool | int | float):
        return CONSTANT
    return Value(terms=UNSCALED if number else (), number=number)


def mixed(values: Iterable[Value], terms: Terms, **changes: Any) -> Value:
    """What comes of several values, apart from what it is linear in."""
    values = list(values)
    past = recent = ends = gates = 0
    for v in values:
        past, recent = past | v.past, recent | v.recent
        ends, gates = ends | v.ends, gates | v.gates
    out = Value(
        max((v.kind for v in values), default=Kind.CONSTANT),
        terms,
        past,
        recent,
        ends,
        gates,
        any(v.is_spread for v in values),
        any(v.is_pair for v in values),
        sole=_sole_of(values),
    )
    return dataclasses.replace(out, **changes) if changes else out


def _sole_of(values: Iterable[Value]) -> int | None:
    found = {v.sole for v in values} - {None}
    return found.pop() if len(found) == 1 else -1 if found else None


def summed(terms: Iterable[Term]) -> Terms:
    """A sum, with the terms of the same factors as one, and so all without any."""
    terms = list(dict.fromkeys(terms))
    if len(terms) == 1:
        return tuple(terms)
    found: dict[Any, list[Term]] = {}
    others: list[Term] = []
    for term in terms:
        if any(f.is_linear for f in term):
            key = tuple((f.source, f.event, f.is_linear) for f in term)
            found.setdefault(key, []).append(term)
        else:
            others.append(term)
    if len(found) > _MOST_TERMS:
        return (unscaled(terms),)
    scaled = [
        tuple(
            _if_few(of[0]._replace(pieces=joined(p for f in of for p in f.pieces)))
            for of in zip(*alike, strict=True)
        )
        if len(alike) > 1
        else alike[0]
        for alike in found.values()
    ]
    return (*scaled, unscaled(others)) if others else tuple(scaled)


def _if_few(factor: Factor) -> Factor:
    """The factor, which cannot be scaled where its entries are in too many places."""
    is_few = len(factor.pieces) <= MOST_PIECES
    return factor if is_few else factor._replace(is_linear=False)


def unscaled(terms: Iterable[Term]) -> Term:
    """What remains of terms where nothing scales them: where axes are."""
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
        # The side with fewer summands is what a clip would scale: a norm's gain, say,
        # and not the sum of all layers before it.
        if len(one) < len(two):
            two = (unscaled(two),)
        else:
            one = (unscaled(one),)

    def kept(term: Term, other: Value) -> Iterator[Factor]:
        sources = {f.source for t in other.terms for f in t}
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
    found: dict[Any, Factor] = {}
    for f in factors:
        key = f.source, f.event
        if key in found:
            pieces = joined((*found[key].pieces, *f.pieces))
            is_linear = found[key].is_linear and f.is_linear
            f = f._replace(pieces=pieces, is_linear=is_linear)
        found[key] = f
    ordered = sorted(found.values(), key=lambda f: (f.event, f.source))
    return tuple(ordered[-_MOST_FACTORS:])

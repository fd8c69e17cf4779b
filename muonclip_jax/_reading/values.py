"""What an array of a trace is, in terms of the parameters.

An array is known as a sum of products, each of whose factors is linear in one source: a
parameter, or the logits of attention. Doubling a factor doubles its product, which is
all that QK-Clip needs to know; a factor that something nonlinear was made of is kept
without that claim, for where its axes are.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .pieces import (
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


# Whether an array was made of parameters alone, of data too, or of neither.
CONSTANT, PARAMETER, ACTIVATION = range(3)


class Factor(NamedTuple):
    """A source that a term is linear in.

    The kind is `"parameter"`, and its number is its place among the leaves, or, by the
    address of a product of activations, `"logits"`, `"capped"`, what a softcap's tanh
    makes of them, `"weights"`, what the exponential of a softmax does, and `"maxima"`,
    which a fused kernel gives next to its output.
    """

    kind: str
    number: Any
    # The place where it met an activation, as a bit; 0 before.
    event: int
    pieces: Pieces
    # False after something nonlinear, such as the division of a norm. Where its axes
    # are still tells heads apart, by the kernel's outputs, though only a gain after the
    # norm can scale them.
    is_linear: bool = True
    # What a softcap was multiplied with after its tanh, if numbers alone; else NaN.
    scale: float = 1.0

    @property
    def digits(self) -> list[Any]:
        """The digits of all pieces that move along an axis of the source."""
        return [d for p in self.pieces for d in p.digits if d.axis is not None]

    @property
    def seen(self) -> list[Any]:
        """Those that move along a dimension of the array, too."""
        return [d for d in self.digits if d.dim is not None and d.dim >= 0]


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


class Value(NamedTuple):
    """An array of the trace."""

    kind: int = CONSTANT
    terms: Terms = UNSCALED
    shape: Shape = ()
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
    def is_parameter(self) -> bool:
        return self.kind == PARAMETER

    @property
    def is_activation(self) -> bool:
        return self.kind == ACTIVATION

    @property
    def is_deep(self) -> bool:
        """Whether it is an activation that parameters had a part in."""
        return self.is_activation and self.past != 0

    def factors(self, *kinds: str) -> list[Factor]:
        kinds = kinds or ("parameter",)
        return [f for term in self.terms for f in term if f.kind in kinds]

    def mapped(
        self, change: Callable[[Pieces], Pieces], shape: Shape, **changes: Any
    ) -> "Value":
        """The value whose pieces are changed all alike; terms without any are zero."""
        terms = []
        for term in self.terms:
            new = tuple(f._replace(pieces=change(f.pieces)) for f in term)
            if all(f.pieces for f in new):
                terms.append(tuple(_joined(f, f) for f in new))
        return self._replace(terms=summed(terms), shape=shape, **changes)

    def moved(
        self, to: Sequence[int | None], shape: Shape, loops=NO_LOOPS, **changes: Any
    ) -> "Value":
        return self.mapped(lambda p: moved(p, to, shape, loops), shape, **changes)

    def reshaped(self, shape: Shape) -> "Value":
        return self.mapped(lambda p: reshaped(p, self.shape, shape), shape)

    def sliced(self, dim: int, start: int, size: int) -> "Value":
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self.mapped(lambda p: sliced(p, dim, start, size), shape)

    def lost_along(self, dims: Iterable[int], shape: Shape) -> "Value":
        """The value whose entries may be anywhere along some dimensions."""
        dims = {*dims}
        return self.moved([None if i in dims else i for i in range(len(shape))], shape)


def parameter(index: int, shape: Shape, is_token: bool) -> Value:
    factor = Factor("parameter", index, 0, whole(shape))
    kind = ACTIVATION if is_token else PARAMETER
    return Value(kind, ((factor,),), shape)


def constant(number: Any) -> Value:
    """A number, if it is known; zero is no summand."""
    # So what is padded or masked with zeros is as linear as it was. With -1e9 it has a
    # summand that nothing scales, of which only the softmax's own logits are followed.
    if not isinstance(number, bool | int | float):
        return Value()
    return Value(terms=UNSCALED if number else (), number=number)


def union(bits: Iterable[int]) -> int:
    """Events of any of several sets."""
    return functools.reduce(operator.or_, bits, 0)


def mixed(values: Iterable[Value], terms: Terms = UNSCALED, **changes: Any) -> Value:
    """What comes of several values, apart from what it is linear in."""
    values = list(values)
    soles = {v.sole for v in values} - {None}
    out = Value(
        max((v.kind for v in values), default=CONSTANT),
        terms,
        values[0].shape if values else (),
        # Past, recent, ends and gates.
        *(union(bits) for bits in zip(*(v[3:7] for v in values), strict=True)),
        is_spread=any(v.is_spread for v in values),
        is_pair=any(v.is_pair for v in values),
        sole=soles.pop() if len(soles) == 1 else -1 if soles else None,
    )
    return out._replace(**changes)


def added(values: Iterable[Value]) -> Terms:
    return summed(term for v in values for term in v.terms)


def summed(terms: Iterable[Term]) -> Terms:
    """A sum, with the terms of the same factors as one, and so all without any."""
    terms = list(dict.fromkeys(terms))
    if len(terms) == 1:
        return tuple(terms)
    found: dict[Any, Term] = {}
    others = [term for term in terms if not any(f.is_linear for f in term)]
    for term in (term for term in terms if any(f.is_linear for f in term)):
        key = tuple((*f[:3], f.is_linear) for f in term)
        pairs = zip(found.get(key, term), term, strict=True)
        found[key] = tuple(_joined(*pair) for pair in pairs)
    if len(found) > _MOST_TERMS:
        return (unscaled(terms),)
    return (*found.values(), *([unscaled(others)] if others else []))


def _joined(a: Factor, b: Factor) -> Factor:
    """A factor whose entries are in the places of both.

    Where these are too many, it cannot be scaled.
    """
    if a is b and len(a.pieces) <= MOST_PIECES:
        return a
    pieces = joined((*a.pieces, *b.pieces))
    is_linear = a.is_linear and b.is_linear and len(pieces) <= MOST_PIECES
    return a._replace(pieces=pieces, is_linear=is_linear)


def unscaled(terms: Iterable[Term]) -> Term:
    """What remains of terms where nothing scales them: where axes are."""
    factors = (f._replace(is_linear=False) for term in terms for f in term)
    return product_of(f for f in factors if f.kind == "parameter")


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
        sources = {f[:2] for t in other.terms for f in t}
        for f in term:
            if f.kind == "capped":
                by = math.nan if other.number is None else other.number
                f = f._replace(scale=f.scale * by)
            # Of a softmax's weights, which are divided by their own sum, all stay.
            elif f.kind != "weights":
                is_same = other.recent & f.event if f.event else f[:2] in sources
                f = f._replace(is_linear=f.is_linear and not is_same)
            yield f

    return summed(
        product_of((*kept(x, b), *kept(y, a))) for x, y in itertools.product(one, two)
    )


def product_of(factors: Iterable[Factor]) -> Term:
    """A term in its only order, by event, with each factor once."""
    found: dict[Any, Factor] = {}
    for f in factors:
        found[f[:3]] = _joined(f, found.get(f[:3], f))
    ordered = sorted(found.values(), key=lambda f: (f.event, *f[:2]))
    return tuple(ordered[-_MOST_FACTORS:])

"""The attention layers that a walk noted: what makes each head's logits larger."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import jaxprs
from .pieces import Digit, Pieces, sliced
from .values import Factor, Term, Terms
from .walk import Logits, Softmax, Walk


class Part(NamedTuple):
    """Entries of a parameter that are linear in logits."""

    parameter: int
    pieces: Pieces  # in the product's dimensions, then those summed over
    heads: tuple[int, ...]  # which of these dimensions tell heads apart
    is_own: bool  # every head has entries of its own
    is_telling: bool  # some heads have: those that share a key, each group its own


#: What no parameter scales, for people.
_NONLINEAR = (
    "something nonlinear, such as a norm without a gain, stands between the parameters "
    "and both sides of the product"
)
_DATA_ADDED = (
    "data or constants are added to both sides of the product, and no parameter scales "
    "these"
)
_GROUPED_KEY = (
    "nothing scales the query, such as one that is normed without a gain, and several "
    "query heads share a key, so that no head can be scaled by itself"
)
_BOTH_SIDES = "query and key could not be told apart"


@dataclasses.dataclass
class Layer:
    """An attention layer: what a clip may scale, and where its logits are."""

    softmax: Softmax
    line: str  # file and line of the product
    # The products, as they are in what the softmax is of.
    logits: tuple[Factor, ...]
    # The dimensions of the last of them that are heads (all have the same), and of each
    # which part: heads count every a-th entry up to b, where a batch is folded in.
    head_dims: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    heads: int = 0
    # Scaled together; `whole` brings all of a factor, since what it meets stays: a key
    # that heads share (`shared`), or a side that no parameter scales.
    query: list[Part] = dataclasses.field(default_factory=list)
    key: list[Part] = dataclasses.field(default_factory=list)
    whole: list[Part] = dataclasses.field(default_factory=list)
    shared: list[Part] = dataclasses.field(default_factory=list)
    # Axes of parameters along which heads are, scaled or not.
    axes: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    # All parameters that either side was made of.
    makers: set[int] = dataclasses.field(default_factory=set)
    refusal: str = ""  # why no parameter scales the logits

    @property
    def parts(self) -> list[Part]:
        return [*self.query, *self.key, *self.whole, *self.shared]


_LOGITS = ("logits", "capped")
_WHICH_MAXIMUM = (
    "the program forms maxima of these logits, none over what its softmax sums over"
)


def attention_layers(walk: Walk) -> list[Layer]:
    """One for each softmax that weighs activations by products of activations."""
    weighed = {note.number for note in walk.notes if note.kind == "weighed"}

    def along(softmax: Softmax, f: Factor) -> tuple[int, frozenset]:
        """A product, and which of its entries a maximum or a sum is over."""
        digits = (d for p in f.pieces for d in p.digits if d.dim in softmax.axes)
        entries = {(d.axis, d.stride, d.size) for d in digits if d.axis is not None}
        return f.source.number, frozenset(entries)

    def of(softmax: Softmax, *kinds: str) -> list[Factor]:
        return [f for t in softmax.terms for f in t if f.source.kind in kinds]

    # A softmax forms its maximum and its sum over the same entries, whichever way they
    # are turned in between. Other maxima of the logits are a program's own statistics.
    summed: dict[int, set[frozenset]] = {}
    for softmax in walk.softmaxes:
        for number, entries in (along(softmax, f) for f in of(softmax, "weights")):
            summed.setdefault(number, set()).add(entries)
    has_maximum = {f.source.number for s in walk.softmaxes for f in of(s, *_LOGITS)}
    seen: set[int] = set()
    layers = []
    # The maximum that a softmax forms tells more than its sum does: there the mask and
    # the sink are still to be seen. Some form none.
    for kinds in (_LOGITS, ("weights",)):
        for softmax in walk.softmaxes:
            factors = of(softmax, *kinds)
            own = {along(softmax, f) for f in factors}
            numbers = {n for n, entries in own if entries in summed.get(n, {entries})}
            if numbers & weighed and not numbers & seen:
                seen |= numbers
                layer = _layer(walk, softmax, factors)
                if kinds != _LOGITS and numbers & has_maximum:
                    # The exponentials may be of what a maximum was subtracted from.
                    layer.refusal = layer.refusal or _WHICH_MAXIMUM
                layers.append(layer)
    return sorted(layers, key=lambda layer: layer.softmax.address)


def _layer(walk: Walk, softmax: Softmax, factors: Sequence[Factor]) -> Layer:
    line = jaxprs.line(walk.logits[factors[0].source.number].eqns)
    layer = Layer(softmax, line, tuple(factors))
    refusals: list[str] = []
    counts: set[int] = set()

    def keys_of(f: Factor) -> set[int]:
        """The dimensions of the product that the softmax is over."""
        digits = (d for p in f.pieces for d in p.digits if d.dim in softmax.axes)
        return {d.axis for d in digits if d.axis is not None}

    # Those with known keys first: they tell what the query's parameters are.
    for f in sorted(factors, key=lambda f: not keys_of(f)):
        logits, keys = walk.logits[f.source.number], keys_of(f)
        queries = {part.parameter for part in (*layer.query, *layer.whole)}
        of_key = _side_of_key(logits, keys, queries)
        if of_key is None:
            refusals.append(_BOTH_SIDES)
            continue
        sides = logits.sides[1 - of_key], logits.sides[of_key]
        made = (f.source for side in sides for term in side for f in term)
        layer.makers |= {source.number for source in made if source.kind == "parameter"}
        layer.head_dims = _heads_of(logits, keys, walk)
        heads = tuple(layer.head_dims)
        count = math.prod(stop // step for step, stop in layer.head_dims.values())
        counts.add(count)
        layer.axes |= {
            (g.source.number, d.axis)
            for term in itertools.chain(*sides)
            for g in term
            for p in g.pieces
            for d in p.digits
            if g.source.kind == "parameter" and d.dim in heads and d.axis is not None
        }
        for region in _regions(logits, sides[1], heads, count):
            q, k = (_parts(side, region, logits, heads, count) for side in sides)
            is_added = all(() in side for side in sides)
            _divide(layer, q, k, is_added, refusals)
    if len(counts) > 1:
        refusals.append(f"its products have {sorted(counts)} heads")
    layer.heads = max(counts, default=0)
    layer.refusal = refusals[0] if refusals else ""
    return layer


def _divide(
    layer: Layer,
    q: list[Part] | None,
    k: list[Part] | None,
    is_added: bool,
    refusals: list[str],
) -> None:
    """Says of both sides of a product which one a clip scales.

    Both, if each head has its own entries in both, or all share both, as the gains of
    QK-norm. Else the query alone: keys that several heads share stay. The key alone
    where nothing scales the query.
    """
    q_own, k_own = (p is not None and all(x.is_own for x in p) for p in (q, k))
    is_told = any(part.is_telling for part in (*(q or ()), *(k or ())))
    if q and k and ((q_own and k_own) or not is_told):
        layer.query += q
        layer.key += k
    elif q and (q_own or not k_own):
        layer.whole += q
        layer.shared += k or []
    elif k and (k_own or not is_told):
        layer.whole += k
    else:
        refusals.append(_GROUPED_KEY if k else _DATA_ADDED if is_added else _NONLINEAR)


def _side_of_key(logits: Logits, keys: set[int], queries: set[int]) -> int | None:
    """Which side is the key: the softmax is over dimensions of the key alone.

    Where these are lost, as by Transformer-XL's shift of relative positions, the query
    has a parameter that the query of another product has, too.
    """
    for i in (1, 0):
        of_query = {f.source.number for t in logits.sides[1 - i] for f in t}
        if keys <= logits.free[i] if keys else of_query & queries:
            return i
    return None


def _heads_of(logits: Logits, keys: set[int], walk: Walk) -> dict[int, tuple[int, int]]:
    """The dimensions that are heads of one side at least, and which part of each."""
    told = [_told_by(logits, side, walk) for side in (0, 1)]
    heads = {}
    for dim in sorted((told[0].keys() | told[1].keys()) - keys):
        extent = logits.shape[dim] if dim >= 0 else walk.devices[dim].size
        pieces = [p for of in told for p in of.get(dim, ())]
        digits = [d for p in pieces for d in p.digits if d.dim == dim]
        own = [d for d in digits if d.axis is not None]
        heads[dim] = 1, extent
        # Along the rest of a dimension all have the same: it is the batch's.
        if dim >= 0 and all(p.span(dim) == (0, extent) for p in pieces):
            heads[dim] = min(d.step for d in own), max(d.step * d.size for d in own)
    return heads


def _told_by(logits: Logits, side: int, walk: Walk) -> dict[int, Pieces]:
    """Dimensions along which a side's entries are of other parameters, and how.

    Devices are one, if each has some of the heads. What a kernel makes has its outputs;
    all summands agree in what is a head. A table of positions, before the kernel or
    added to what it makes, tells positions apart, and so do learned tokens alone, which
    have positions where the other side has none.
    """
    of_kernels: list[tuple[Pieces, set[int]]] = []
    of_others: list[tuple[Pieces, set[int]]] = []
    possible = {*range(len(logits.shape)), *walk.devices}
    for term in logits.sides[side]:
        factors = [f for f in term if f.source.kind == "parameter"]
        kernels = [f for f in factors if _is_summed(f)][-1:]
        pieces = tuple(p for f in kernels or factors for p in f.pieces)
        digits = [d for p in pieces for d in p.digits if d.axis is not None]
        dims = possible & {d.dim for d in digits}
        if kernels:
            of_kernels.append((pieces, dims))
        elif factors:
            of_others.append((pieces, dims - logits.free[side]))
    # Biases, adapters and a second stream of tokens are summands, each with its own
    # other dimensions.
    told = of_kernels or of_others
    agreed = set.intersection(*(dims for _, dims in told)) if told else set()
    every = tuple(p for pieces, _ in told for p in pieces)
    return {dim: tuple(p for p in every if _is_telling((p,), [dim])) for dim in agreed}


def _is_summed(factor: Factor) -> bool:
    return any(d.dim is None for p in factor.pieces for d in p.digits)


def head_digits(pieces: Pieces, heads: Sequence[int]) -> tuple[Digit, ...] | None:
    """The digits that tell heads apart, major first; `None` if pieces disagree."""
    found = {
        tuple(
            sorted(
                (d for d in p.digits if d.dim in heads and d.axis is not None),
                key=lambda d: (heads.index(d.dim), -d.step),  # type: ignore[arg-type]
            )
        )
        for p in pieces
    }
    return found.pop() if len(found) == 1 else None


def _is_own(pieces: Pieces, heads: Sequence[int], count: int) -> bool:
    digits = head_digits(pieces, heads)
    return digits is not None and math.prod(d.size for d in digits) == count


def _is_telling(pieces: Pieces, heads: Sequence[int]) -> bool:
    return any(d.axis is not None and d.dim in heads for p in pieces for d in p.digits)


#: A range of the dimension that a product sums over.
Region = tuple[int, int] | None


def _regions(
    logits: Logits, key: Terms, heads: Sequence[int], count: int
) -> Iterable[Region]:
    """Ranges of what is summed over in which keys are of one kind.

    The key of latent attention is joined: one part has heads, the other, which a rotary
    embedding turns, is the same for all of them.
    """
    # Joined parts are along one dimension; two that are summed over are of one kind.
    if len(logits.summed) != 1:
        return [None]
    dim, extent = len(logits.shape), logits.summed[0]
    spans: dict[tuple[bool, bool], list[int]] = {}
    for term in key:
        linear = [f for f in term if f.source.kind == "parameter" and f.is_linear]
        for p in (p for f in linear[-1:] for p in f.pieces):
            low, high = p.span(dim)
            kind = _is_own((p,), heads, count), _is_telling((p,), heads)
            span = spans.setdefault(kind, [low, high])
            span[:] = min(span[0], low), max(span[1], high)
    ranges = sorted(map(tuple, spans.values()))
    is_divided = all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    if len(ranges) < 2 or not is_divided:
        return [None]
    return itertools.pairwise([0, *(low for low, _ in ranges[1:]), extent])


def _parts(
    terms: Terms, region: Region, logits: Logits, heads: tuple[int, ...], count: int
) -> list[Part] | None:
    """One factor of every summand in a region, or `None` if one has none to scale.

    Of several, the last that tells heads apart; else the last: a gain comes after the
    kernel that something nonlinear separates from the logits.
    """
    found: list[Part] = []
    for term in terms:
        inside = _inside(term, region, logits)
        if term and inside is None:
            continue  # the summand is elsewhere
        parts = [
            Part(
                f.source.number,
                f.pieces,
                heads,
                _is_own(f.pieces, heads, count),
                _is_telling(f.pieces, heads),
            )
            for f in inside or ()
            if f.source.kind == "parameter" and f.is_linear
        ]
        if not parts:
            return None
        # In W_b (W_a x), low rank or latent, W_b has the heads; in LoRA's sum x A B, B.
        own = [p for p in parts if p.is_own]
        telling = [p for p in parts if p.is_telling]
        found.append((own or telling or parts)[-1])
    return found or None


def _inside(term: Term, region: Region, logits: Logits) -> list[Factor] | None:
    if region is None:
        return list(term)
    dim, (low, high) = len(logits.shape), region
    kept = [f._replace(pieces=sliced(f.pieces, dim, low, high - low)) for f in term]
    return kept if all(f.pieces for f in kept) else None

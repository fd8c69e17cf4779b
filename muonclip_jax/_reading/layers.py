"""The attention layers that a walk noted: what makes each head's logits larger."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from . import jaxprs, pieces
from .head_layouts import covers
from .pieces import Pieces, Shape
from .values import Factor, Term, Terms
from .walk import Logits, Softmax, Walk, Weighted


class Part(NamedTuple):
    """Entries of a parameter that are linear in logits.

    **Arguments:**

    - `parameter`: its place among the leaves.
    - `pieces`: where they lie in the product's dimensions, then those summed over.
    - `dims`, `sizes`: of the heads among these.
    - `is_own`: whether every head has entries of its own.
    """

    parameter: int
    pieces: Pieces
    dims: tuple[int, ...]
    sizes: Shape
    is_own: bool


@dataclasses.dataclass(frozen=True)
class Layer:
    """An attention layer: what a clip may scale, and where its logits are.

    **Arguments:**

    - `query`, `key`: scaled together.
    - `whole`: takes all of a factor, since what it meets stays: a key that heads share,
        or one that no parameter scales.
    - `shared`: keys that stay.
    - `refusal`: why no parameter scales the logits; empty if some do.
    - `line`: file and line of the product.
    - `softmax`: where the logits enter it.
    - `axes`: of parameters, along which heads lie, scaled or not.
    - `logits`: the products, as they lie in what the softmax takes.
    - `head_dims`: of the last of them; all have the same.
    """

    query: tuple[Part, ...]
    key: tuple[Part, ...]
    whole: tuple[Part, ...]
    shared: tuple[Part, ...]
    heads: int
    refusal: str
    line: str
    softmax: Softmax
    axes: frozenset[tuple[int, int]]
    logits: tuple[Factor, ...]
    head_dims: tuple[int, ...]

    @property
    def parameters(self) -> frozenset[int]:
        parts = (*self.query, *self.key, *self.whole, *self.shared)
        return frozenset(p.parameter for p in parts)


def attention_layers(walk: Walk) -> list[Layer]:
    """One for each softmax that weighs activations by products of activations."""
    weighted = {n.logits for n in walk.notes if isinstance(n, Weighted)}
    notes = [n for n in walk.notes if isinstance(n, Softmax)]
    seen: set[int] = set()
    layers = []
    # The maximum that a softmax takes tells more than its sum does; some take none.
    for kinds in (("logits", "capped"), ("weights",)):
        for note in notes:
            factors = [f for t in note.terms for f in t if f.source.kind in kinds]
            own = {f.source.number for f in factors}
            if own & weighted and not own & seen:
                seen |= own
                layers.append(_layer(walk, note, factors))
    return sorted(layers, key=lambda layer: layer.softmax.address)


def _layer(walk: Walk, note: Softmax, factors: Sequence[Factor]) -> Layer:
    query: list[Part] = []
    key: list[Part] = []
    whole: list[Part] = []
    shared: list[Part] = []
    refusals, counts, axes = [], set(), set()
    heads: list[int] = []
    line = jaxprs.line(walk.logits[factors[0].source.number].eqn)
    for f in sorted(factors, key=lambda f: not _dims_of(f.pieces, note.axes)):
        logits = walk.logits[f.source.number]
        keys = _dims_of(f.pieces, note.axes)
        sides = _sides(logits, keys, {p.parameter for p in (*query, *whole)})
        if sides is None:
            refusals.append("query and key could not be told apart")
            continue
        heads = sorted(
            set().union(*(_head_dims(s, logits, walk) for s in sides)) - keys
        )
        sizes = tuple(
            logits.shape[i] if i >= 0 else walk.devices[i].size for i in heads
        )
        counts.add(math.prod(sizes))
        axes |= {
            (g.source.number, d.axis)
            for side in sides
            for term in side
            for g in term
            for p in g.pieces
            for d in p.digits
            if g.source.kind == "parameter" and d.dim in heads and d.axis is not None
        }
        for region in _regions(logits, sides[1], heads, sizes):
            q = _parts(sides[0], region, logits, heads, sizes)
            k = _parts(sides[1], region, logits, heads, sizes)
            is_own = [p is not None and all(x.is_own for x in p) for p in (q, k)]
            if q and k and (all(is_own) or not any(is_own)) and _alike(q, k):
                query += q
                key += k
            elif q and (is_own[0] or not is_own[1]):
                whole += q
                shared += k or []
            elif k:
                whole += k
            else:
                refusals.append(
                    "something nonlinear, such as a norm without a gain, stands "
                    "between the parameters and both sides of the product"
                )
    if len(counts) > 1:
        refusals.append(f"its products have {sorted(counts)} heads")
    return Layer(
        _unique(query),
        _unique(key),
        _unique(whole),
        _unique(shared),
        max(counts, default=0),
        refusals[0] if refusals else "",
        line,
        note,
        frozenset(axes),
        tuple(factors),
        tuple(heads),
    )


def _alike(q: Sequence[Part], k: Sequence[Part]) -> bool:
    """Whether both sides have every head's own entries, or both share them all.

    A key for several heads each, as grouped queries have it, is neither.
    """
    return all(p.is_own for p in (*q, *k)) or not any(_told_apart(p) for p in (*q, *k))


def _told_apart(part: Part) -> bool:
    return any(_tells(piece, part.dims) for piece in part.pieces)


def _tells(piece: pieces.Piece, heads: Sequence[int]) -> bool:
    return any(d.axis is not None and d.dim in heads for d in piece.digits)


def _unique(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(dict.fromkeys(parts))


def _dims_of(found: Pieces, dims: Sequence[int]) -> set[int]:
    """Dimensions of the product that some of the array's came from."""
    return {
        d.axis for p in found for d in p.digits if d.dim in dims and d.axis is not None
    }


def _sides(
    logits: Logits, keys: set[int], queries: set[int]
) -> tuple[Terms, Terms] | None:
    """Query and key: the softmax is over dimensions of the key alone.

    Where these are lost, as by Transformer-XL's shift of relative positions, the query
    has a parameter that the query of another product has, too.
    """
    for i in (1, 0):
        one, two = logits.sides[1 - i], logits.sides[i]
        is_of_query = {f.source.number for t in one for f in t} & queries
        if keys <= logits.free[i] if keys else is_of_query:
            return one, two
    return None


def _head_dims(terms: Terms, logits: Logits, walk: Walk) -> set[int]:
    """Dimensions of the product along which a side's entries are of other parameters.

    Devices are one, if each has some of the heads.

    What a kernel makes has its outputs; all summands agree in what is a head. A table
    of positions, before the kernel or beside, tells positions apart.
    """
    of_kernels, of_others = [], []
    for term in terms:
        parameters = [f for f in term if f.source.kind == "parameter"]
        kernels = [f for f in parameters if _is_summed(f)][-1:]
        dims = {
            d.dim
            for f in kernels or parameters
            for p in f.pieces
            for d in p.digits
            if d.axis is not None and d.dim is not None
        }
        if parameters:
            (of_kernels if kernels else of_others).append(dims)
    agreed = set.intersection(*(of_kernels or of_others or [set()]))
    return {*range(len(logits.shape)), *walk.devices} & agreed


def _is_summed(factor: Factor) -> bool:
    return any(d.dim is None for p in factor.pieces for d in p.digits)


Region = tuple[int, int] | None


def _regions(
    logits: Logits, key: Terms, heads: Sequence[int], sizes: Shape
) -> list[Region]:
    """Ranges of what is summed over in which keys are of one kind.

    The key of latent attention is joined: one part has heads, the other, which a rotary
    embedding turns, is the same for all of them.
    """
    if len(logits.summed) != 1:
        return [None]
    dim, extent = len(logits.shape), logits.summed[0]
    spans: dict[tuple, list[int]] = {}
    for term in key:
        parameters = [f for f in term if f.source.kind == "parameter" and f.is_linear]
        for f in parameters[-1:]:
            for p in f.pieces:
                low, high = p.span(dim)
                kind = (covers((p,), heads, sizes), not _tells(p, heads))
                span = spans.setdefault(kind, [low, high])
                span[:] = min(span[0], low), max(span[1], high)
    ranges = sorted((low, high) for low, high in spans.values())
    is_divided = all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    if len(ranges) < 2 or not is_divided:
        return [None]
    edges = [0, *(low for low, _ in ranges[1:]), extent]
    return list(itertools.pairwise(edges))


def _parts(
    terms: Terms, region: Region, logits: Logits, heads: Sequence[int], sizes: Shape
) -> list[Part] | None:
    """One factor of every summand in a region, or `None` if one has none to scale.

    Of several, the last that tells heads apart; else the last.
    """
    found = []
    for term in terms:
        inside = _inside(term, region, logits)
        if term and inside is None:
            continue  # the summand lies elsewhere
        parts = [
            Part(
                f.source.number,
                f.pieces,
                tuple(heads),
                sizes,
                covers(f.pieces, heads, sizes),
            )
            for f in inside or ()
            if f.source.kind == "parameter" and f.is_linear
        ]
        if not parts:
            return None
        own = [p for p in parts if p.is_own]
        telling = [p for p in parts if _told_apart(p)]
        found.append((own or telling or parts)[-1])
    return found or None


def _inside(term: Term, region: Region, logits: Logits) -> list[Factor] | None:
    if region is None:
        return list(term)
    dim, (low, high) = len(logits.shape), region
    extent = logits.summed[0]
    kept = [
        f._replace(pieces=pieces.sliced(f.pieces, dim, low, high - low, 1, extent))
        for f in term
    ]
    return kept if all(f.pieces for f in kept) else None

"""The attention layers that a walk noted: what makes each head's logits larger.

As QK-Clip is given them, they are leaves by their paths, and where in each heads are.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._model.attention_layers import AttentionLayer
from .._model.owned_leaf import joined, OwnedLeaf
from .._parameters import paths
from . import jaxprs
from .pieces import Digit, PICKED, Piece, Pieces, Shape, sliced
from .values import Factor, Terms
from .walk import Logits, Softmax, Walk


class Part(NamedTuple):
    """Entries of a parameter that are linear in logits."""

    parameter: int
    pieces: Pieces  # in the product's dimensions, then those summed over
    heads: dict[int, tuple[int, int]]  # the product's `Layer.head_dims`
    is_own: bool  # every head has entries of its own
    is_telling: bool  # some heads have: those that share a key, each group its own


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


def attention_layers(walk: Walk) -> list[Layer]:
    """One for each softmax that weighs activations by products of activations."""
    weighed = walk.numbers_of("weighed")

    def of(softmax: Softmax, factors: Iterable[Factor]) -> set[tuple[Any, frozenset]]:
        """Products, and which of their entries a maximum or a sum is over."""
        own = ((f, [d for d in f.digits if d.dim in softmax.axes]) for f in factors)
        return {(f.number, frozenset((d[3:], d.size) for d in ds)) for f, ds in own}

    # A softmax forms its maximum and its sum over the same entries, whichever way they
    # are turned in between. Other maxima of the logits are a program's own statistics.
    sums = set().union(*(of(s, s.factors("weights")) for s in walk.softmaxes))
    has_sum = {number for number, _ in sums}
    kinds = ("logits", "capped"), ("weights",)
    has_maximum = {f.number for s in walk.softmaxes for f in s.factors(*kinds[0])}
    seen: set[Any] = set()
    layers = []
    # The maximum that a softmax forms tells more than its sum does: there the mask and
    # the sink are still to be seen. Some form none.
    for kind, softmax in itertools.product(kinds, walk.softmaxes):
        factors = softmax.factors(*kind)
        own = of(softmax, factors)
        numbers = {x[0] for x in own if x in sums or x[0] not in has_sum}
        if numbers & weighed and not numbers & seen:
            seen |= numbers
            layers.append(_layer(walk, softmax, factors))
            if kind == kinds[1] and numbers & has_maximum:
                # The exponentials may be of what a maximum was subtracted from.
                layers[-1].refusal = layers[-1].refusal or (
                    "the program forms maxima of these logits, none over what its "
                    "softmax sums over"
                )
    return sorted(layers, key=lambda layer: layer.softmax.address)


def _layer(walk: Walk, softmax: Softmax, factors: Sequence[Factor]) -> Layer:
    line = jaxprs.line(walk.logits[factors[0].number].eqns)
    layer = Layer(softmax, line, tuple(factors))
    refusals: list[str] = []
    counts: set[int] = set()

    # The dimensions of each product that the softmax is over. Those of which some are
    # known first: they tell what the query's parameters are.
    along = [({d.axis for d in f.digits if d.dim in softmax.axes}, f) for f in factors]
    for keys, f in sorted(along, key=lambda x: not x[0]):
        logits = walk.logits[f.number]
        queries = {part.parameter for part in (*layer.query, *layer.whole)}
        # The softmax is over dimensions of the key alone. Where these are lost, as by
        # Transformer-XL's shift of relative positions, the query has a parameter that
        # the query of another product has, too.
        made = [{f.number for t in side for f in t} for side in logits.sides]
        is_key = [
            keys <= logits.free[i] if keys else made[1 - i] & queries for i in (0, 1)
        ]
        if not any(is_key):
            refusals.append("query and key could not be told apart")
            continue
        of_query, of_key = logits.sides if is_key[1] else logits.sides[::-1]
        own = [g for t in (*of_query, *of_key) for g in t]
        layer.makers |= {g.number for g in own}
        layer.head_dims = heads = _heads_of(logits, keys, walk)
        counts.add(math.prod(stop // step for step, stop in heads.values()))
        layer.axes |= {
            (g.number, d.axis) for g in own for d in g.digits if d.dim in heads
        }
        for q, k in _by_region(logits, (of_query, of_key), heads):
            # Both sides are scaled if each head has its own entries in both, or all
            # share both, as the gains of QK-norm. Else the query alone: keys that
            # several heads share stay. The key alone where nothing scales the query.
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
            elif k:
                refusals.append(
                    "nothing scales the query, such as one that is normed without a "
                    "gain, and several query heads share a key"
                )
            elif () in of_query and () in of_key:
                refusals.append(
                    "data or constants are added to both sides of the product, and no "
                    "parameter scales these"
                )
            else:
                refusals.append(
                    "something nonlinear, such as a norm without a gain, stands "
                    "between the parameters and both sides of the product"
                )
    if len(counts) > 1:
        refusals.append(f"its products have {sorted(counts)} heads")
    layer.heads = max(counts, default=0)
    layer.refusal = refusals[0] if refusals else ""
    return layer


def _heads_of(logits: Logits, keys: set[int], walk: Walk) -> dict[int, tuple[int, int]]:
    """The dimensions that are heads of one side at least, and which part of each.

    Along them a side's entries are of other parameters. Devices are one, if each has
    some of the heads. What a kernel makes has its outputs; all summands, such as
    biases, adapters and a second stream of tokens, agree in what is a head. A table of
    positions, before the kernel or added to what it makes, tells positions apart, and
    so do learned tokens alone, which have positions where the other side has none.
    """
    possible = {*range(len(logits.shape)), *walk.devices}
    told: dict[int, list[Piece]] = {}
    for terms, free in zip(logits.sides, logits.free, strict=True):
        of_kernels: list[tuple[Pieces, set[int]]] = []
        of_others: list[tuple[Pieces, set[int]]] = []
        for term in terms:
            made = [f for f in term if any(d.dim is None for d in f.digits)][-1:]
            pieces = tuple(p for f in made or term for p in f.pieces)
            dims = possible & {d.dim for f in made or term for d in f.digits}
            if made:
                of_kernels.append((pieces, dims))
            elif term:
                of_others.append((pieces, dims - free))
        own = of_kernels or of_others
        for dim in set.intersection(*(dims for _, dims in own)) if own else ():
            every = (p for pieces, _ in own for p in pieces)
            told.setdefault(dim, []).extend(p for p in every if _digits(p, (dim,)))
    heads = {}
    for dim in sorted(told.keys() - keys):
        extent = logits.shape[dim] if dim >= 0 else walk.devices[dim].size
        digits = [d for p in told[dim] for d in _digits(p, (dim,))]
        heads[dim] = 1, extent
        # Along the rest of a dimension all have the same: it is the batch's.
        if dim >= 0 and all(p.span(dim) == (0, extent) for p in told[dim]):
            heads[dim] = (
                min(d.step for d in digits),
                max(d.step * d.size for d in digits),
            )
    return heads


def _digits(piece: Piece, heads: Sequence[int]) -> tuple[Digit, ...]:
    """The digits that tell heads apart, major first."""
    own = (d for d in piece.digits if d.dim in heads and d.axis is not None)
    return tuple(sorted(own, key=lambda d: (heads.index(d.dim), -d.step)))  # type: ignore


def _by_region(
    logits: Logits, sides: tuple[Terms, Terms], head_dims: dict[int, tuple[int, int]]
) -> Iterator[list[list[Part] | None]]:
    """One factor of every summand of query and key, or `None` if one has none to scale.

    Once for each range of what is summed over in which keys are of one kind. The key of
    latent attention is joined: one part has heads, the other, which a rotary embedding
    turns, is the same for all of them.
    """
    heads, at = tuple(head_dims), len(logits.shape)
    count = math.prod(stop // step for step, stop in head_dims.values())

    def part(parameter: int, pieces: Pieces) -> Part:
        found = {_digits(p, heads) for p in pieces}
        is_telling, digits = any(found), found.pop() if len(found) == 1 else None
        is_own = digits is not None and math.prod(d.size for d in digits) == count
        return Part(parameter, pieces, head_dims, is_own, is_telling)

    def parts(terms: Terms, low: int, high: int) -> list[Part] | None:
        found: list[Part] = []
        for term in terms:
            of = [(f, sliced(f.pieces, at, low, high - low)) for f in term]
            if not all(pieces for _, pieces in of):
                continue  # the summand is elsewhere
            own = [part(f.number, pieces) for f, pieces in of if f.is_linear]
            if not own:
                return None
            # The last that tells heads apart: in W_b (W_a x), low rank or latent, W_b
            # has them; in LoRA's sum x A B, B. Else the last: a gain comes after the
            # kernel that something nonlinear separates from the logits.
            best = [p for p in own if p.is_own] or [p for p in own if p.is_telling]
            found.append((best or own)[-1])
        return found or None

    # Joined parts are along one dimension; two that are summed over are of one kind.
    spans: dict[tuple[bool, bool], list[int]] = {}
    for term in sides[1] if len(logits.summed) == 1 else ():
        for p in (p for f in [f for f in term if f.is_linear][-1:] for p in f.pieces):
            one, (low, high) = part(0, (p,)), p.span(at)
            span = spans.setdefault((one.is_own, one.is_telling), [low, high])
            span[:] = min(span[0], low), max(span[1], high)
    ranges = sorted(spans.values())
    is_divided = all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    starts = [low for low, _ in ranges[1:]] if is_divided else []
    for low, high in itertools.pairwise([0, *starts, logits.summed[0]]):
        yield [parts(side, low, high) for side in sides]


# As QK-Clip is given them.


class NamedLayer(NamedTuple):
    """An attention layer by its path, the deepest module that holds all its leaves."""

    path: paths.Path
    layer: AttentionLayer | None  # as QK-Clip is given it, if it can scale it
    refusal: str  # why not, for people; else empty
    found: tuple[Layer, ...]  # several where one layer is called often


Roles = tuple[tuple[OwnedLeaf, ...], ...]


def named_layers(
    layers: Sequence[Layer], leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> list[NamedLayer]:
    """Every layer once, however often the function calls it."""

    def is_same(a: tuple[Roles, str, Layer], b: tuple[Roles, str, Layer]) -> bool:
        """Whether two calls are of one layer: they have the same parameters.

        Unless they are told to have different parts of these, as layers have that a
        Python loop picks from a stack.
        """
        if not b[2].parts:
            one, two = ((x[1], x[2].makers, x[2].line) for x in (a, b))
            return one == two
        if b[1] and not b[2].refusal and not a[1]:
            return False  # which layers of a stack it has is not known
        one, two = ({part.parameter for part in x[2].parts} for x in (a, b))
        return one == two and not any(
            x.path == y.path and x.is_apart_from(y)
            for mine, theirs in zip(a[0], b[0], strict=False)
            for x, y in itertools.product(mine, theirs)
        )

    calls = [(*_roles(layer, leaf_paths, shapes), layer) for layer in layers]
    groups: list[list[tuple[Roles, str, Layer]]] = []
    # Those first of which it is known where the heads are.
    for call in sorted(calls, key=lambda call: bool(call[1])):
        group = next((group for group in groups if is_same(group[0], call)), None)
        if group is None:
            groups.append([call])
        else:
            group.append(call)
    # The path of a layer is that of its statistic, and of nothing else: the deepest
    # module that holds all leaves, or all that the logits were made of.
    modules, firsts = [], []
    for (roles, _, layer), *_ in groups:
        own = {part.parameter for part in layer.parts} or layer.makers
        around = [leaf_paths[i][:-1] for i in sorted(own)] or [()]
        levels = zip(*around, strict=False)
        same = itertools.takewhile(lambda x: len(set(x)) == 1, levels)
        modules.append(tuple(name for name, *_ in same))
        firsts.append(next((x.path for leaves in roles for x in leaves), ""))
    clipped = [m for m, group in zip(modules, groups, strict=True) if group[0][0]]
    named = []
    for i, group in enumerate(groups):
        (roles, refusal, _), *_ = group
        module, start, below = modules[i], "", len("/".join((*modules[i], "")))
        # Of several layers in one module each is at its first leaf, with a number where
        # others are there, too, and its leaves are named from the root.
        if clipped.count(module) > 1 and roles:
            same_first = [j for j, first in enumerate(firsts) if first == firsts[i]]
            number = (str(same_first.index(i)),) if len(same_first) > 1 else ()
            module, start, below = (*paths.split(firsts[i]), *number), "/", 0
        leaves = (
            tuple(dataclasses.replace(x, path=start + x.path[below:]) for x in of)
            for of in roles
        )
        layer = AttentionLayer("/".join(module), *leaves) if roles else None
        named.append(NamedLayer(module, layer, refusal, tuple(x[2] for x in group)))
    return named


def _roles(
    layer: Layer, leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> tuple[Roles, str]:
    """Query, key and what brings the whole, by paths from the root, or why none are."""
    if layer.refusal:
        return (), layer.refusal
    groups = layer.query, layer.key, layer.whole
    if not layer.query and layer.shared and all(p.is_own for p in layer.whole):
        # Key heads for several queries each are a key, which QK-Clip then leaves alone.
        groups = layer.whole, layer.shared, []
    roles = []
    for parts in groups:
        # Several products of the same leaves scale them once.
        found: dict[OwnedLeaf, None] = {}
        for part in parts:
            path, shape = "/".join(leaf_paths[part.parameter]), shapes[part.parameter]
            leaf = _owned_leaf(path, shape, part)
            if isinstance(leaf, str):
                return (), leaf.format(path, shape)
            found[leaf] = None
        roles.append(tuple(found))
    return tuple(roles), ""


def _owned_leaf(path: str, shape: Shape, part: Part) -> OwnedLeaf | str:
    """The leaf with the head of every entry of the part; or why it has none."""
    pieces, head_dims = part.pieces, part.heads
    # Trips of loops are layers; the outermost loop has the first of negative numbers.
    own = {d for p in pieces for d in p.digits if d.axis is not None}
    loops: Any = [d for d in own if d.dim is not None and d.dim < 0]
    loops = sorted((d for d in loops if d.dim not in head_dims), key=lambda d: -d.dim)
    if any(d.dim == PICKED for d in loops):
        return (
            "an index that is no counter of a loop picks a layer of '{}' {}: use "
            "jax.lax.scan over the stack, or an index that counts 0, 1, ..."
        )
    stack = tuple(d.axis for d in loops)
    is_whole = all(
        (d.size, d.stride) == (shape[d.axis], 1) and all(d in p.digits for p in pieces)
        for d in loops
    )
    if len({*stack}) < len(stack) or not is_whole:
        return (
            "a loop does not go through all layers in '{}' {} one by one: use "
            "jax.lax.scan over an axis that has all of them, and no others"
        )

    def is_even(axis: int) -> bool:
        """Whether all pieces have the axis as a whole, for whichever head."""
        of = ([d for d in p.digits if d.axis == axis] for p in pieces)
        n = shape[axis]
        return all([d.size for d in x] == [n] and x[0].dim not in head_dims for x in of)

    def is_told(d: Digit) -> bool:
        """Whether it leads to another entry or, if it repeats one, to another head."""
        if d.axis is not None:
            return d.axis not in even
        step, stop = head_dims.get(d.dim, (0, 0))  # type: ignore
        return d.step < stop and d.step * d.size > step

    # Along even axes one entry is as good as all.
    even = {*stack, *filter(is_even, range(len(shape)))}
    sizes = [1 if axis in even else n for axis, n in enumerate(shape)]
    count = math.prod(stop // step for step, stop in head_dims.values())
    entries, heads = [], []
    for p in pieces:
        own = [d for d in p.digits if is_told(d)]
        counters = np.indices([d.size for d in own], sparse=True)
        pairs = [*zip(own, counters, strict=True)]
        at: list[Any] = [0 if i in even else x for i, x in enumerate(p.offset)]
        for d, n in pairs:
            if d.axis is not None:
                at[d.axis] = at[d.axis] + d.stride * n
        head = np.zeros((), int)
        for dim, (step, stop) in head_dims.items():
            start = p.start[dim] if dim >= 0 else 0
            along = start + sum(d.step * n for d, n in pairs if d.dim == dim)
            head = head * (stop // step) + along % stop // step
        both = np.broadcast_arrays(np.ravel_multi_index(tuple(at), sizes), head)
        entries.append(both[0].ravel())
        heads.append(both[1].ravel())
    entry, head = np.concatenate(entries), np.concatenate(heads)
    first = np.full(math.prod(sizes), count)
    np.minimum.at(first, entry, head)
    # Heads that have an entry in common are one: a group that shares a key, or all.
    same = joined(count, first[entry], head)
    groups, number = np.unique(same, return_inverse=True)
    owners = np.append(number, -1)[first].reshape(sizes).squeeze(stack)
    return OwnedLeaf(path, stack, owners, len(groups))

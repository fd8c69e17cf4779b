"""Products and lookups: the primitives in which parameters show what they are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .jaxprs import shape_of
from .pieces import Shape, whole
from .rules import note_features, note_scales, picked, times, weigh
from .values import ACTIVATION, Factor, mixed, multiplied, summed, Value
from .walk import Logits, rule, Walk


class Side(NamedTuple):
    """One operand of a product."""

    value: Value
    # The dimension of the result that each of its own becomes; `None` if summed over.
    to: tuple[int | None, ...]
    # Dimensions of matrices that have nothing to do with one another.
    stack: frozenset[int] = frozenset()

    def over(self, shape: Shape) -> Value:
        """The operand in the dimensions of the result."""
        return self.value.moved(self.to, shape)

    @property
    def gone(self) -> set[int]:
        """The dimensions that are summed over."""
        return {i for i, to in enumerate(self.to) if to is None}


#: Dimensions that are summed over, of both sides.
Pairs = Sequence[tuple[int, int]]


@rule("dot_general ragged_dot_general ragged_dot")
def dot_general(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """Of the result, batch dimensions are first, then what is free on each side.

    In a ragged product, rows of the left go to the matrix of their group on the right.
    """
    groups: tuple[int, ...] = ()
    if "ragged_dot_dimension_numbers" in eqn.params:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        groups = tuple(numbers.rhs_group_dimensions)
        if not groups:  # a gradient's mode
            return walk.unknown(values)
        (ca, cb), (ba, bb) = numbers.dot_dimension_numbers
    else:
        (ca, cb), (ba, bb) = eqn.params["dimension_numbers"]
    a, b = values[:2]
    free_a = [i for i in range(len(a.shape)) if i not in (*ca, *ba)]
    free_b = [i for i in range(len(b.shape)) if i not in (*cb, *bb, *groups)]

    def side(value: Value, order: list[int | None], stack: Any) -> Side:
        dims = range(len(value.shape))
        to = tuple(order.index(i) if i in order else None for i in dims)
        return Side(value, to, frozenset(stack))

    sides = (
        side(a, [*ba, *free_a], ba),
        side(b, [*bb, *[None] * len(free_a), *free_b], (*bb, *groups)),
    )
    pairs = () if groups else tuple(zip(ca, cb, strict=True))
    return product(walk, eqn, sides, pairs)


@rule("conv_general_dilated")
def conv(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    numbers = eqn.params["dimension_numbers"]
    groups = eqn.params["feature_group_count"]
    image, kernel = values
    batch, feature, *spatial = numbers.lhs_spec
    out_batch, out_feature, *_ = numbers.out_spec
    out, inp, *_ = numbers.rhs_spec
    to_image: list[int | None] = [None] * len(image.shape)
    to_kernel: list[int | None] = [None] * len(kernel.shape)
    to_image[batch], to_kernel[out] = out_batch, out_feature
    # In groups as many as features, each goes its own way: Mamba's and ConvNeXt's.
    if groups > 1 and shape_of(eqn.outvars[0])[out_feature] == image.shape[feature]:
        to_image[feature] = out_feature
    # Along the window entries mix, and their number may change.
    image = image.lost_along(spatial, image.shape)
    kind = "depthwise" if groups > 1 and kernel.shape[inp] == 1 else "contracted"
    if image.is_parameter and not kernel.kind:
        kind = "elementwise"  # a fixed filter of a parameter
    sides = Side(image, tuple(to_image)), Side(kernel, tuple(to_kernel))
    return product(walk, eqn, sides, (), kind)


def product(
    walk: Walk,
    eqn: Any,
    sides: tuple[Side, Side],
    pairs: Pairs,
    kind: str = "contracted",
) -> Value:
    """A sum of products of entries: an activation's with its weight, or of any two."""
    shape = shape_of(eqn.outvars[0])
    # A product that sums over nothing, where one side has no other dimensions, is
    # one of entries: `einsum("...k,k->...k")` is how some norms apply their gain.
    if any(side.stack == {*range(len(side.to))} for side in sides):
        return times(walk, *(side.over(shape) for side in sides))

    def is_copied(side: Side, other: Value) -> bool:
        """Whether a parameter is the same in every example that an activation has."""
        if not (side.value.is_spread and other.is_deep):
            return False
        own = {d.dim for f in side.value.factors() for d in f.digits}
        return any(side.value.shape[dim] > 1 for dim in side.stack - own)

    # Tokens are no weight: what was copied for each example of a batch, and where two
    # parameters meet, what was copied at all, or normed.
    is_weight = [
        s.value.is_parameter and not is_copied(s, other.value)
        for s, other in zip(sides, sides[::-1], strict=True)
    ]
    if all(is_weight):
        is_weight = [
            not s.value.is_spread and all(f.is_linear for f in s.value.factors())
            for s in sides
        ]
    if all(is_weight):
        return _of_parameters(walk, sides, shape)
    sides = tuple(
        s if is_one else s._replace(value=walk.as_activation(s.value))
        for s, is_one in zip(sides, is_weight, strict=True)
    )  # type: ignore[assignment]
    if not any(is_weight):
        return _of_activations(walk, sides, shape, pairs)
    at = is_weight.index(True)
    weight, other = sides[at], sides[1 - at]
    event, ends, kernels = walk.event(), 0, set()
    if other.value.is_onehot:
        walk.use("looked up", weight.value)
    else:
        ends = event
        experts = _note_experts(walk, other)
        matched = {pair[at] for pair in pairs if pair[1 - at] in experts}
        _note_weight(walk, weight, kind, matched)
        walk.note("fed", events=other.value.past)
        note_features(walk, other.value)
        kernels = {f.number for f in weight.value.factors()}
        walk.kernels |= kernels
    # One-hot rows that pick entries are a lookup, which is no layer of its own: what it
    # gives is made by whatever chose the rows.
    past, recent = other.value.past | event, other.value.recent | event
    walk.past_of[event] = past
    x = other.over(shape)
    # Axes are known up to the next weight: its outputs are new.
    linear = (
        tuple(f for f in term if f.is_linear and f.kind != "weights")
        for term in x.terms
    )
    x = x._replace(terms=summed(linear))
    terms = multiplied(walk.met(weight.over(shape)), x)
    sole = None if not kernels else kernels.pop() if len(kernels) == 1 else -1
    return Value(ACTIVATION, terms, shape, past, recent, ends, sole=sole)


def _of_parameters(walk: Walk, sides: tuple[Side, Side], shape: Shape) -> Value:
    """Two parameters make one of low rank, which is the weight of what follows."""
    for side, free in zip(sides, ("input?", "output?"), strict=True):
        for f in side.value.factors():
            ranks = {d.axis for d in f.digits if d.dim in side.gone}
            # Where nothing else tells, inputs are the first's, as in x @ (A @ B).
            others = {d.axis for d in f.seen} - ranks
            roles = [(axis, "rank") for axis in sorted(ranks)]
            roles += [(axis, free) for axis in sorted(others)]
            walk.note("factor", f.number, roles=tuple(roles))
    a, b = (side.over(shape) for side in sides)
    return mixed((a, b), multiplied(a, b), is_pair=True, is_spread=False)


def _of_activations(
    walk: Walk, sides: tuple[Side, Side], shape: Shape, pairs: Pairs
) -> Value:
    """Two activations: these may be the logits of attention, or what they weigh."""
    for weights, side in zip(sides, sides[::-1], strict=True):
        is_mixed = bool(pairs) and not {*range(len(side.to))} <= side.gone | side.stack
        weigh(walk, weights.value, side.value, is_mixed)
    a, b = (s.value for s in sides)
    if not (a.is_deep and b.is_deep and pairs):
        a, b = (side.over(shape) for side in sides)
        note_scales(walk, a, b)
        return mixed((a, b), multiplied(a, b), gates=0)
    over, terms, free = tuple(a.shape[i] for i, _ in pairs), [], []
    for i, side in enumerate(sides):
        dims = {*range(len(side.to))} - side.stack
        note_features(walk, side.value, dims=dims)
        # In the dimensions of the result and, after them, those summed over.
        to = list(side.to)
        for j, pair in enumerate(pairs):
            to[pair[i]] = len(shape) + j
        made = side.value.moved(to, (*shape, *over)).terms
        terms.append([tuple(f for f in t if f.kind == "parameter") for t in made])
        free.append(frozenset(side.to[j] for j in dims - side.gone))
    made: Any = walk.eqns, shape, over, tuple(map(tuple, terms)), tuple(free)
    walk.logits[walk.at], event = Logits(*made), walk.event()
    factor = Factor("logits", walk.at, event, whole(shape))
    past, recent = a.past | b.past | event, a.recent | b.recent | event
    walk.past_of[event] = past
    # What another activation is multiplied with is no output yet.
    return Value(ACTIVATION, ((factor,),), shape, past, recent, sole=-1)


def _note_weight(walk: Walk, side: Side, kind: str, experts: set[int]) -> None:
    """Notes what the axes of each parameter are in the weight of a product."""

    def role(dim: int) -> str:
        if dim < 0 or dim in side.stack or dim in experts:
            return "stack"
        return "input" if side.to[dim] is None else "output"

    for term in side.value.terms:
        for f in term:
            digits = [d for d in f.digits if d.dim is not None]
            roles = tuple(dict.fromkeys((d.axis, role(d.dim)) for d in digits))
            # A gain of the weight: what has not both sides, unless a part of a product.
            is_alone = len(term) == 1 or side.value.is_pair
            is_weight = is_alone or {"input", "output"} <= {said for _, said in roles}
            used = kind if is_weight else "elementwise"
            walk.note(used, f.number, events=walk.event(), roles=roles)


def _note_experts(walk: Walk, side: Side) -> set[int]:
    """Notes what of an activation's making are experts; dimensions they are along.

    Entries that go to different matrices are of experts. So are those that the softmax
    of a router has weighed before a product sums over them and over inputs: of each
    expert. Where it sums over what was weighed alone, that is the input, as classes are
    of an expected embedding.
    """
    factors = side.value.factors()
    weighed = {d.dim for f in factors if f.event & walk.gates for d in f.digits}
    is_each = bool(side.gone - weighed)
    dims = {*side.stack, *(weighed & side.gone if is_each else ())}
    for f in factors if dims else ():
        for axis in {d.axis for d in f.seen}:
            if {d.dim for d in f.seen if d.axis == axis} <= dims:
                walk.note("expert", f.number, roles=((axis, "expert"),))
    return dims


# Lookups.


@rule("gather")
def gather(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    (value, index), new = values, shape_of(eqn.outvars[0])
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    # By one index, not one for each token: a slice.
    is_picked = len(numbers.offset_dims) == len(new)
    indexed, old = numbers.start_index_map, value.shape
    out = value
    if index.number is not None or is_picked:
        shape = tuple(sizes[i] if i in indexed else n for i, n in enumerate(old))
        out = picked(value, dict.fromkeys(indexed, index), shape)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(old)) if i not in gone]
    to: list[int | None] = [None] * len(old)
    for i, at in zip(kept, numbers.offset_dims, strict=True):
        to[i] = at if sizes[i] == out.shape[i] else None
    # Dimensions that both sides have in common, as `vmap` leaves them.
    rest = [at for at in range(len(new)) if at not in numbers.offset_dims]
    batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    for i, j in zip(*batch, strict=True):
        to[i] = rest[j]
    out = out.moved(to, new)
    if not value.is_parameter:
        return mixed((out, index), out.terms)
    if max((len({d.axis for d in f.seen}) for f in out.factors()), default=0) < 2:
        walk.use("looked up", value)
        met = walk.met(out)
        return met._replace(past=met.past | index.past)
    # What is left may be matrices, one for each entry of the index, as experts that
    # tokens choose, or tokens. A product will tell.
    return out._replace(past=index.past, is_spread=not is_picked)

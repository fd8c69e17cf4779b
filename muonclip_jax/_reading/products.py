"""Products and lookups: the primitives in which parameters show what they are."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import gates
from .jaxprs import shape_of
from .pieces import PICKED, Shape, whole
from .rules import times, weigh
from .values import Factor, Kind, mixed, multiplied, Source, summed, Value
from .walk import Logits, rule, Walk


class Side(NamedTuple):
    """One operand of a product."""

    value: Value
    shape: Shape
    # The dimension of the result that each of its own becomes; `None` if summed over.
    to: tuple[int | None, ...]
    # Dimensions of matrices that have nothing to do with one another.
    stack: frozenset[int] = frozenset()

    def over(self, shape: Shape) -> Value:
        """The operand in the dimensions of the result."""
        return self.value.moved(self.to, shape)


#: Dimensions that are summed over, of both sides.
Pairs = Sequence[tuple[int, int]]


@rule("dot_general")
def dot_general(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    (ca, cb), _ = numbers = eqn.params["dimension_numbers"]
    pairs = tuple(zip(ca, cb, strict=True))
    return product(walk, eqn, _sides(eqn, values, numbers), pairs)


@rule("ragged_dot_general ragged_dot")
def ragged_dot(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    """Rows of the left side go to the matrix of their group on the right."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    groups = tuple(numbers.rhs_group_dimensions)
    if not groups:  # a gradient's mode
        return walk.unknown(values)
    sides = _sides(eqn, values, numbers.dot_dimension_numbers, groups)
    return product(walk, eqn, sides, ())


def _sides(eqn: Any, values: list[Value], numbers: Any, groups=()) -> tuple[Side, Side]:
    """Operands of a product whose result is batch, then what is free on each side."""
    (ca, cb), (ba, bb) = numbers
    a, b = map(shape_of, eqn.invars[:2])
    free_a = [i for i in range(len(a)) if i not in (*ca, *ba)]
    free_b = [i for i in range(len(b)) if i not in (*cb, *bb, *groups)]

    def side(i: int, shape: Shape, order: list[int | None], stack: Any) -> Side:
        to = (order.index(i) if i in order else None for i in range(len(shape)))
        return Side(values[i], shape, tuple(to), frozenset(stack))

    return (
        side(0, a, [*ba, *free_a], ba),
        side(1, b, [*bb, *[None] * len(free_a), *free_b], (*bb, *groups)),
    )


@rule("conv_general_dilated")
def conv(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    numbers = eqn.params["dimension_numbers"]
    groups = eqn.params["feature_group_count"]
    a, b = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    batch, feature, *spatial = numbers.lhs_spec
    out_batch, out_feature, *_ = numbers.out_spec
    out, inp, *_ = numbers.rhs_spec
    to_a: list[int | None] = [None] * len(a)
    to_b: list[int | None] = [None] * len(b)
    to_a[batch], to_b[out] = out_batch, out_feature
    # In groups as many as features, each goes its own way: Mamba's and ConvNeXt's.
    if groups > 1 and shape_of(eqn.outvars[0])[out_feature] == a[feature]:
        to_a[feature] = out_feature
    # Along the window entries mix, and their number may change.
    mixed_along = [None if i in spatial else i for i in range(len(a))]
    image = values[0].moved(mixed_along, a)
    kind = "depthwise" if groups > 1 and b[inp] == 1 else "contracted"
    if image.kind == Kind.PARAMETER and values[1].kind == Kind.CONSTANT:
        kind = "elementwise"  # a fixed filter of a parameter
    sides = Side(image, a, tuple(to_a)), Side(values[1], b, tuple(to_b))
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
    if any(side.stack == {*range(len(side.shape))} for side in sides):
        one, two = (side.over(shape) for side in sides)
        return times(walk, one, two)
    # Tokens are no weight: what was copied for each example of a batch, and where two
    # parameters meet, what was copied at all, or normed.
    is_parameter = [
        s.value.kind == Kind.PARAMETER and not _is_copied(s, other.value)
        for s, other in zip(sides, sides[::-1], strict=True)
    ]
    if all(is_parameter):
        is_parameter = [
            not s.value.is_spread and all(f.is_linear for f in s.value.factors())
            for s in sides
        ]
        if all(is_parameter):
            return _of_parameters(walk, sides, shape)
    sides = tuple(
        s if is_weight else s._replace(value=walk.as_activation(s.value))
        for s, is_weight in zip(sides, is_parameter, strict=True)
    )  # type: ignore[assignment]
    if not any(is_parameter):
        return _of_activations(walk, sides, shape, pairs)
    at = is_parameter.index(True)
    weight, other = sides[at], sides[1 - at]
    if other.value.is_onehot:
        walk.use("looked up", weight.value)
        event, ends, kernels = walk.event, 0, set()
    else:
        event = ends = walk.event
        experts = _note_experts(walk, other)
        matched = {pair[at] for pair in pairs if pair[1 - at] in experts}
        _note_weight(walk, weight, kind, matched)
        walk.note("fed", events=other.value.past)
        gates.features(walk, other.value)
        kernels = {f.source.number for f in weight.value.factors()}
        walk.kernels |= kernels
    # One-hot rows that pick entries are a lookup, which is no layer of its own: what it
    # gives is made by whatever chose the rows.
    past, recent = other.value.past | event, other.value.recent | event
    walk.past_of[event] = past
    x = other.over(shape)
    # Axes are known up to the next weight: its outputs are new.
    linear = (
        tuple(f for f in term if f.is_linear and f.source.kind != "weights")
        for term in x.terms
    )
    x = dataclasses.replace(x, terms=summed(linear))
    terms = multiplied(walk.met(weight.over(shape)), x)
    sole = None if not kernels else kernels.pop() if len(kernels) == 1 else -1
    return Value(Kind.ACTIVATION, terms, past, recent, ends, sole=sole)


def _is_copied(side: Side, other: Value) -> bool:
    """Whether a parameter is the same in every example that an activation has."""
    if not (side.value.is_spread and other.is_deep):
        return False
    factors = side.value.factors()
    own = {
        d.dim for f in factors for p in f.pieces for d in p.digits if d.axis is not None
    }
    return any(side.shape[dim] > 1 for dim in side.stack - own)


def _of_parameters(walk: Walk, sides: tuple[Side, Side], shape: Shape) -> Value:
    """Two parameters make one of low rank, which is the weight of what follows."""
    for side, free in zip(sides, ("input?", "output?"), strict=True):
        gone = {i for i, to in enumerate(side.to) if to is None}
        for f in side.value.factors():
            digits = [d for p in f.pieces for d in p.digits if d.dim in gone]
            ranks = {d.axis for d in digits if d.axis is not None}
            # Where nothing else tells, inputs are the first's, as in x @ (A @ B).
            others = {axis for p in f.pieces for axis in p.axes} - ranks
            roles = [(axis, "rank") for axis in sorted(ranks)]
            roles += [(axis, free) for axis in sorted(others)]
            walk.note("factor", f.source.number, roles=tuple(roles))
    a, b = (side.over(shape) for side in sides)
    return mixed((a, b), multiplied(a, b), is_pair=True, is_spread=False)


def _of_activations(
    walk: Walk, sides: tuple[Side, Side], shape: Shape, pairs: Pairs
) -> Value:
    """Two activations: these may be the logits of attention, or what they weigh."""
    for weights, side in zip(sides, sides[::-1], strict=True):
        free = (i for i, to in enumerate(side.to) if to is not None)
        is_mixed = bool(pairs) and any(i not in side.stack for i in free)
        weigh(walk, weights.value, side.value, is_mixed)
    a, b = (s.value for s in sides)
    if not (a.is_deep and b.is_deep and pairs):
        one, two = (side.over(shape) for side in sides)
        for mine, other in ((one, two), (two, one)):
            gates.met(walk, mine, other)
        return mixed((one, two), multiplied(one, two), gates=0)
    for side in sides:
        gates.features(walk, side.value, dims={*range(len(side.shape))} - side.stack)
    over = tuple(sides[0].shape[i] for i, _ in pairs)
    terms, free = [], []
    for i, side in enumerate(sides):
        # In the dimensions of the result and, after them, those summed over.
        to = list(side.to)
        for j, pair in enumerate(pairs):
            to[pair[i]] = len(shape) + j
        terms.append(side.value.moved(to, (*shape, *over)).terms)
        free.append(
            frozenset(
                at
                for i, at in enumerate(side.to)
                if at is not None and i not in side.stack
            )
        )
    index = walk.product(Logits(walk.eqns, shape, over, tuple(terms), tuple(free)))  # type: ignore
    factor = Factor(Source("logits", index), walk.event, whole(shape))
    past = a.past | b.past | walk.event
    recent = a.recent | b.recent | walk.event
    walk.past_of[walk.event] = past
    # What another activation is multiplied with is no output yet.
    return Value(Kind.ACTIVATION, ((factor,),), past, recent, sole=-1)


def _note_weight(walk: Walk, side: Side, kind: str, experts: set[int]) -> None:
    """Notes what the axes of each parameter are in the weight of a product."""

    def role(dim: int) -> str:
        if dim < 0 or dim in side.stack or dim in experts:
            return "stack"
        return "input" if side.to[dim] is None else "output"

    for term in side.value.terms:
        for f in term:
            digits = [d for p in f.pieces for d in p.digits]
            roles = tuple(
                dict.fromkeys(
                    (d.axis, role(d.dim))
                    for d in digits
                    if d.axis is not None and d.dim is not None
                )
            )
            # A gain of the weight: what has not both sides, unless a part of a product.
            is_alone = len(term) == 1 or side.value.is_pair
            is_weight = is_alone or {"input", "output"} <= {said for _, said in roles}
            used = kind if is_weight else "elementwise"
            walk.note(used, f.source.number, events=walk.event, roles=roles)


def _note_experts(walk: Walk, side: Side) -> set[int]:
    """Notes what of an activation's making are experts; dimensions they are along.

    Entries that go to different matrices are of experts. So are those that the softmax
    of a router has weighed before a product sums over them and over inputs: of each
    expert. Where it sums over what was weighed alone, that is the input, as classes are
    of an expected embedding.
    """
    weighed = {
        d.dim
        for f in side.value.factors()
        for p in f.pieces
        for d in p.digits
        if f.event & walk.gates and d.axis is not None and d.dim is not None
    }
    gone = {i for i, to in enumerate(side.to) if to is None}
    dims: frozenset[Any] = side.stack | (weighed & gone if gone - weighed else set())
    for f in side.value.factors() if dims else ():
        along: dict[int, set[int]] = {}
        for d in (d for p in f.pieces for d in p.digits):
            if d.axis is not None and d.dim is not None and d.dim >= 0:
                along.setdefault(d.axis, set()).add(d.dim)
        for axis, found in along.items():
            if found <= dims:
                walk.note("expert", f.source.number, roles=((axis, "expert"),))
    return set(dims)


# Lookups.


@rule("gather")
def gather(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    value, index = values
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if index.number is not None:
        for i in numbers.start_index_map:
            at = min(max(int(index.number), 0), old[i] - sizes[i])
            value = value.sliced(i, at, sizes[i])
            old = (*old[:i], sizes[i], *old[i + 1 :])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(old)) if i not in gone]
    to: list[int | None] = [None] * len(old)
    for i, at in zip(kept, numbers.offset_dims, strict=True):
        to[i] = at if sizes[i] == old[i] else None
    is_picked = len(numbers.offset_dims) == len(new)  # by one index, not one per token
    for i in numbers.start_index_map if is_picked else ():
        if sizes[i] == 1 < old[i]:
            to[i] = PICKED if index.trip is None else index.trip
    # Dimensions that both sides have in common, as `vmap` leaves them.
    rest = [at for at in range(len(new)) if at not in numbers.offset_dims]
    for i, j in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        to[i] = rest[j]
    out = value.moved(to, new)
    if value.kind != Kind.PARAMETER:
        return mixed((out, index), out.terms)
    seen = [set().union(*(p.axes for p in f.pieces)) for f in out.factors()]
    if max(map(len, seen), default=0) < 2:
        walk.use("looked up", value)
        met = walk.met(out)
        return dataclasses.replace(met, past=met.past | index.past)
    # What is left may be matrices, one for each entry of the index, as experts that
    # tokens choose, or tokens. A product will tell.
    return dataclasses.replace(out, past=index.past, is_spread=not is_picked)

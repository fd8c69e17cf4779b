"""Products and lookups: the primitives in which parameters show what they are."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import pieces
from .jaxprs import shape_of
from .pieces import Shape
from .rules import weigh
from .values import Factor, Kind, mixed, multiplied, Source, summed, Value
from .walk import Fed, Logits, rule, Stacked, Use, Walk


class Side(NamedTuple):
    """One operand of a product.

    **Arguments:**

    - `value`, `shape`: of the operand.
    - `to`: the dimension of the result that each of its own becomes; `None` for those
        that are summed over.
    - `stack`: dimensions of matrices that have nothing to do with one another.
    """

    value: Value
    shape: Shape
    to: tuple[int | None, ...]
    stack: frozenset[int] = frozenset()


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
        return walk.unknown(eqn, values)
    return product(
        walk, eqn, _sides(eqn, values, numbers.dot_dimension_numbers, groups), ()
    )


def _sides(eqn: Any, values: list[Value], numbers: Any, groups=()) -> tuple[Side, Side]:
    """Operands of a product whose result is batch, then what is free on each side."""
    (ca, cb), (ba, bb) = numbers
    a, b = map(shape_of, eqn.invars[:2])
    free_a = [i for i in range(len(a)) if i not in (*ca, *ba)]
    free_b = [i for i in range(len(b)) if i not in (*cb, *bb, *groups)]
    order = [*ba, *free_a], [*bb, *[None] * len(free_a), *free_b]
    to = [
        tuple(o.index(i) if i in o else None for i in range(len(s)))
        for o, s in zip(order, (a, b), strict=True)
    ]
    return (
        Side(values[0], a, to[0], frozenset(ba)),
        Side(values[1], b, to[1], frozenset((*bb, *groups))),
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
    if groups > 1 and shape_of(eqn.outvars[0])[out_feature] == a[feature]:
        to_a[feature] = out_feature
    # Along the window entries mix, and their number may change.
    mixed_along = [None if i in spatial else i for i in range(len(a))]
    image = values[0].moved(mixed_along, a)
    kind = "depthwise" if groups > 1 and b[inp] == 1 else "contracted"
    sides = (Side(image, a, tuple(to_a)), Side(values[1], b, tuple(to_b)))
    if image.kind == Kind.PARAMETER and values[1].kind == Kind.CONSTANT:
        kind = "elementwise"  # a fixed filter of a parameter
    return product(walk, eqn, sides, (), kind)


def product(
    walk: Walk,
    eqn: Any,
    sides: tuple[Side, Side],
    pairs: Sequence[tuple[int, int]],
    kind: str = "contracted",
) -> Value:
    """A sum of products of entries: an activation's with its weight, or of any two."""
    shape = shape_of(eqn.outvars[0])
    is_parameter = [s.value.kind == Kind.PARAMETER for s in sides]
    if all(is_parameter):
        tokens = [_is_tokens(s.value) for s in sides]
        if not any(tokens):
            return _of_parameters(walk, eqn, sides, shape)
        one, two = (
            s._replace(value=walk.as_activation(s.value, eqn)) if is_token else s
            for s, is_token in zip(sides, tokens, strict=True)
        )
        sides = one, two
        is_parameter = [not is_token for is_token in tokens]
    if not any(is_parameter):
        return _of_activations(walk, eqn, sides, shape, pairs)
    at = is_parameter.index(True)
    weight, other = sides[at], sides[1 - at]
    if other.value.is_onehot:
        walk.use("looked up", weight.value, eqn)
        event, ends = walk.event, 0
    else:
        event = ends = walk.event
        _note_weight(walk, eqn, weight, kind, event)
        walk.note(Fed(event, other.value.past))
    walk.past_of[event] = other.value.past | event
    _note_stacked(walk, other)
    x = _to(other, shape)
    # Axes are known up to the next weight: its outputs are new.
    linear = (
        tuple(f for f in term if f.is_linear and f.source.kind != "weights")
        for term in x.terms
    )
    x = dataclasses.replace(x, terms=summed(linear))
    terms = multiplied(walk.met(_to(weight, shape)), x)
    past = other.value.past | event
    return Value(Kind.ACTIVATION, terms, past, other.value.recent | event, ends)


def _of_parameters(
    walk: Walk, eqn: Any, sides: tuple[Side, Side], shape: Shape
) -> Value:
    """Two parameters make one of low rank, which is the weight of what follows."""
    for side in sides:
        for f in side.value.factors():
            roles = [(axis, "rank") for axis in _summed(f, side)]
            free = "input" if side is sides[0] else "output"
            # Where nothing else tells, inputs are the first's, as in x @ (A @ B).
            roles += [(axis, f"{free}?") for axis in _kept(f, side)]
            walk.note(Use("factor", f.source.number, tuple(roles), 0, eqn))
    a, b = (_to(side, shape) for side in sides)
    out = mixed((a, b), multiplied(a, b))
    return dataclasses.replace(out, is_pair=True, is_spread=False)


def _of_activations(
    walk: Walk,
    eqn: Any,
    sides: tuple[Side, Side],
    shape: Shape,
    pairs: Sequence[tuple[int, int]],
) -> Value:
    """Two activations: these may be the logits of attention, or what they weigh."""
    a, b = (s.value for s in sides)
    weigh(walk, a, b)
    one, two = (_to(side, shape) for side in sides)
    if not (a.is_deep and b.is_deep and pairs):
        return dataclasses.replace(mixed((one, two), multiplied(one, two)), gates=0)
    event = walk.event
    over = tuple(sides[0].shape[i] for i, _ in pairs)
    full = (*shape, *over)

    def spread(side: Side, places: list[int]) -> Value:
        """In the dimensions of the result and, behind them, those summed over."""
        to = list(side.to)
        for j, i in enumerate(places):
            to[i] = len(shape) + j
        return side.value.moved(to, full)

    terms = tuple(
        spread(side, [pair[i] for pair in pairs]).terms for i, side in enumerate(sides)
    )
    free = tuple(
        frozenset(
            at for i, at in enumerate(side.to) if at is not None and i not in side.stack
        )
        for side in sides
    )
    index = walk.product_of(
        Logits(walk.address, eqn, terms, shape, over, free)  # type: ignore[arg-type]
    )
    factor = Factor(Source("logits", index), event, pieces.whole(shape))
    walk.past_of[event] = a.past | b.past | event
    past, recent = a.past | b.past | event, a.recent | b.recent | event
    # What another activation is multiplied with is no output yet.
    return Value(Kind.ACTIVATION, ((factor,),), past, recent)


def _note_weight(walk: Walk, eqn: Any, side: Side, kind: str, event: int) -> None:
    """What the axes of each parameter are in the weight of a product."""
    for term in side.value.terms:
        for f in term:
            roles: list[tuple[int, str]] = []
            for piece in f.pieces:
                for d in piece.digits:
                    if d.axis is None or d.dim is None:
                        continue
                    if d.dim < 0 or d.dim in side.stack:
                        roles.append((d.axis, "stack"))
                    elif side.to[d.dim] is None:
                        roles.append((d.axis, "input"))
                    else:
                        roles.append((d.axis, "output"))
            said = {role for _, role in roles}
            # A gain of the weight: what has not both sides, unless a part of a product.
            is_alone = len(term) == 1 or side.value.is_pair
            is_weight = is_alone or {"input", "output"} <= said
            walk.note(
                Use(
                    kind if is_weight else "elementwise",
                    f.source.number,
                    tuple(dict.fromkeys(roles)),
                    event,
                    eqn,
                )
            )


def _note_stacked(walk: Walk, side: Side) -> None:
    """What of an activation's making goes to different matrices: outputs of experts."""
    if not side.stack:
        return
    for f in side.value.factors():
        along: dict[int, set[int]] = {}
        for p in f.pieces:
            for d in p.digits:
                if d.axis is not None and d.dim is not None and d.dim >= 0:
                    along.setdefault(d.axis, set()).add(d.dim)
        for axis, dims in along.items():
            if dims <= side.stack:
                walk.note(Stacked(f.source.number, axis))


def _to(side: Side, shape: Shape) -> Value:
    return side.value.moved(side.to, shape)


def _summed(factor: Factor, side: Side) -> list[int]:
    gone = {i for i, to in enumerate(side.to) if to is None}
    found = {d.axis for p in factor.pieces for d in p.digits if d.dim in gone}
    return sorted(axis for axis in found if axis is not None)


def _kept(factor: Factor, side: Side) -> list[int]:
    every = {axis for p in factor.pieces for axis in p.axes}
    return sorted(every - set(_summed(factor, side)))


def _is_tokens(value: Value) -> bool:
    """Whether a parameter that meets another is an activation, and not its factor."""
    return value.is_spread or any(not f.is_linear for f in value.factors())


# Lookups.


@rule("gather")
def gather(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    value, index = values
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    for i in numbers.start_index_map if index.number is not None else ():
        if sizes[i] < old[i]:
            at = min(max(int(index.number or 0), 0), old[i] - sizes[i])
            value = value.sliced(i, at, sizes[i], 1, old[i])
            old = (*old[:i], sizes[i], *old[i + 1 :])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(old)) if i not in gone]
    to: list[int | None] = [None] * len(old)
    for i, at in zip(kept, numbers.offset_dims, strict=True):
        to[i] = at if sizes[i] == old[i] else None
    # Dimensions that both sides have in common, as `vmap` leaves them.
    rest = [at for at in range(len(new)) if at not in numbers.offset_dims]
    for i, j in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        to[i] = rest[j]
    out = value.moved(to, new)
    if value.kind != Kind.PARAMETER:
        return dataclasses.replace(mixed((out, index), out.terms), is_onehot=False)
    seen = [set().union(*(p.axes for p in f.pieces)) for f in out.factors()]
    if max(map(len, seen), default=0) < 2:
        walk.use("looked up", value, eqn)
        met = walk.met(out)
        return dataclasses.replace(met, past=met.past | index.past)
    # What is left may be matrices, one for each entry of the index, or tokens.
    is_spread = len(numbers.offset_dims) < len(new)
    return dataclasses.replace(out, past=index.past, is_spread=is_spread)

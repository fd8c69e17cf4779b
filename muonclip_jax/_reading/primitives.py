"""How marks go back through each primitive: which entries of its operands contribute.

A rule covers every operand in which a result is linear. Linear for positive factors, as
a maximum is, is enough: QK-Clip's factors are positive. The reading cannot follow a
primitive without a rule; the reading names it if it matters.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import jaxprs
from .jaxprs import names, shape_of
from .marks import full, Marks, moved, placed, reshaped, Shape, small, union_along


#: A function from the marks of a result to the marks of an operand.
Move = Callable[[Marks], Marks]
Moves = list[tuple[int, Move]]


class Op(NamedTuple):
    """A result of an equation, as the rules below receive it."""

    eqn: Any  # the `Eqn`
    k: int  # which result
    out: Shape
    ins: list[Shape]

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.jaxpr_eqn.params

    @property
    def lead(self) -> int:
        return len(self.eqn.frame.lead)

    def through(self, to: Sequence[int | None]) -> Move:
        """Returns the move to an operand.

        `to[d]` is the dimension of the result that dimension `d` becomes, or `None`.
        """
        lead = self.lead
        if [*to] == [*range(len(self.out))]:
            return small
        return lambda marks: small(moved(marks, lead, to))


_MOVES: dict[str, Callable[[Op], Moves]] = {}


def _rule(primitives: str) -> Callable[[Callable[[Op], Moves]], Callable[[Op], Moves]]:
    def register(function: Callable[[Op], Moves]) -> Callable[[Op], Moves]:
        _MOVES.update(dict.fromkeys(primitives.split(), function))
        return function

    return register


def moves(eqn: Any, k: int) -> Moves:
    """Returns how the marks of the `k`-th result go back to each operand.

    A product has a move for each of its two operands, since it is linear in each. The
    list is empty for a primitive without a rule.
    """
    if k not in eqn.known_moves:
        op = Op(eqn, k, eqn.output(k).shape, [x.shape for x in eqn.inputs()])
        eqn.known_moves[k] = _MOVES[eqn.name](op) if eqn.name in _MOVES else []
    return eqn.known_moves[k]


#: Primitives that compute each entry of the result from one entry of each operand.
ELEMENTWISE = names(
    "mul div log log1p exp exp2 expm1 logistic rsqrt sqrt cbrt pow integer_pow "
    "square erf erfc erf_inv sin cos tan tanh sinh cosh asin acos atan atan2 asinh "
    "acosh atanh sign floor ceil round is_finite not and or xor eq ne lt le gt ge "
    "eq_to le_to lt_to rem clamp polynomial lgamma digamma igamma igammac "
    "bessel_i0e bessel_i1e regularized_incomplete_beta shift_left "
    "shift_right_logical population_count shift_right_arithmetic"
)


_LINEAR = names(
    "add sub add_any max min select_n complex nextafter convert_element_type copy "
    "copy_p reduce_precision neg real imag conj pvary pcast optimization_barrier "
    "mesh_cast reshard sharding_constraint abs pbroadcast layout_constraint "
    "stop_gradient device_put bitcast_convert_type ppermute sharding_barrier name"
)


@_rule(" ".join(ELEMENTWISE | _LINEAR))
def _entrywise(op: Op) -> Moves:
    """Returns the moves of an entry-by-entry operation, possibly a broadcast."""
    own = range(1 if op.eqn.name == "select_n" else 0, len(op.ins))
    if len(op.eqn.jaxpr_eqn.outvars) > 1:  # a result for each operand
        own = [op.k]
    return [(i, op.through(_same(op.ins[i], op.out))) for i in own]


def _same(of: Shape, out: Shape) -> list[int | None]:
    """Returns the result's dimension for each of an operand; `None` if broadcast."""
    if len(of) != len(out):
        return [None] * len(of)
    return [d if n == out[d] else None for d, n in enumerate(of)]


@_rule("reshape squeeze expand_dims")
def _reshape(op: Op) -> Moves:
    shape, order = op.ins[0], None
    if op.eqn.name == "reshape":
        order = op.params.get("dimensions")  # a transpose before it, as `vmap` makes
    if order is None:
        return [(0, lambda marks: reshaped(marks, op.lead, op.out, shape))]
    turned = tuple(shape[d] for d in order)
    back = [*range(op.lead), *(op.lead + order.index(d) for d in range(len(shape)))]
    return [(0, lambda marks: reshaped(marks, op.lead, op.out, turned).transpose(back))]


@_rule("transpose")
def _transpose(op: Op) -> Moves:
    order = op.params["permutation"]
    return [(0, op.through([order.index(i) for i in range(len(op.out))]))]


@_rule("broadcast_in_dim")
def _broadcast(op: Op) -> Moves:
    at = zip(op.ins[0], op.params["broadcast_dimensions"], strict=True)
    return [(0, op.through([d if n == op.out[d] else None for n, d in at]))]


@_rule("tile")
def _tile(op: Op) -> Moves:
    apart = tuple(itertools.chain(*zip(op.params["reps"], op.ins[0], strict=True)))

    def move(marks: Marks) -> Marks:
        marks = reshaped(marks, op.lead, op.out, apart)
        return small(moved(marks, op.lead, range(1, len(apart), 2)))

    return [(0, move)]


@_rule("reduce_sum reduce_max reduce_min")
def _reduce(op: Op) -> Moves:
    left, axes = itertools.count(), op.params["axes"]
    own = range(len(op.ins[0]))
    return [(0, op.through([None if i in axes else next(left) for i in own]))]


@_rule(
    "cumsum cummax cummin cumlogsumexp reduce_window_sum fft sort top_k approx_top_k"
)
def _along(op: Op) -> Moves:
    """Returns the moves of an operation that mixes entries along dimensions."""
    if op.k >= len(op.ins):
        return []  # indices
    keys, own = ("axis", "dimension", "reduction_dimension"), range(len(op.out))
    axes = [op.params[key] % len(op.out) for key in keys if key in op.params] or own
    return [(op.k, op.through([None if d in axes else d for d in own]))]


@_rule("rev")
def _rev(op: Op) -> Moves:
    axes = [op.lead + d for d in op.params["dimensions"]]
    return [(0, lambda x: np.flip(x, tuple(a for a in axes if x.shape[a] > 1)))]


# Primitives that take entries from some places, or put them there.


@_rule("slice")
def _slice(op: Op) -> Moves:
    starts, steps = op.params["start_indices"], op.params["strides"]
    steps = steps or (1,) * len(op.out)

    def move(marks: Marks) -> Marks:
        for d, (start, step, n) in enumerate(zip(starts, steps, op.out, strict=True)):
            if op.ins[0][d] != n:
                at = slice(start, start + (n - 1) * step + 1, step)
                marks = placed(marks, op.lead + d, op.ins[0][d], at)
        return marks

    return [(0, move)]


@_rule("split unstack")
def _split(op: Op) -> Moves:
    axis = op.params["axis"]
    size = op.ins[0][axis]
    sizes = op.params.get("sizes", (1,) * size)
    at = slice(sum(sizes[: op.k]), sum(sizes[: op.k + 1]))

    def move(marks: Marks) -> Marks:
        if op.eqn.name == "unstack":  # the result lacks the axis
            marks = np.expand_dims(marks, op.lead + axis)
        return placed(marks, op.lead + axis, size, at)

    return [(0, move)]


@_rule("concatenate stack")
def _concatenate(op: Op) -> Moves:
    # the dimension, from JAX 0.12 on
    is_new = op.eqn.name == "stack"
    dim = op.params["axis" if is_new else "dimension"]
    sizes = (1 if is_new else x[dim] for x in op.ins)
    ends, axis = list(itertools.accumulate(sizes, initial=0)), op.lead + dim

    def part(i: int) -> Move:
        def move(marks: Marks) -> Marks:
            marks = full(marks, axis, op.out[dim]).take(
                range(ends[i], ends[i + 1]), axis
            )
            return small(marks.squeeze(axis) if is_new else marks)

        return move

    return [(i, part(i)) for i in range(len(op.ins))]


@_rule("pad")
def _pad(op: Op) -> Moves:
    def move(marks: Marks) -> Marks:
        for d, (low, high, gap) in enumerate(op.params["padding_config"]):
            axis = op.lead + d
            if low < 0 or high < 0 or gap:
                marks = union_along(marks, [axis])
            elif low or high:
                marks = full(marks, axis, op.out[d])
                marks = marks.take(range(low, low + op.ins[0][d]), axis)
        return small(marks)

    return [(0, move), (1, op.through([]))]


@_rule("dynamic_slice")
def _dynamic_slice(op: Op) -> Moves:
    starts = dict(enumerate(op.eqn.inputs()[1:]))
    return [(0, lambda marks: _picked(marks, op, starts, op.out))]


def _picked(marks: Marks, op: Op, starts: dict[int, Any], out: Shape) -> Marks:
    """Returns the marks of the operand that entries were picked from."""
    for d, start in starts.items():
        size, axis = op.ins[0][d], op.lead + d
        if out[d] == size:
            continue
        at = start.number
        if isinstance(at, int):
            # XLA moves a slice that would end outside back inside.
            at = min(max(at, 0), size - out[d])
            marks = placed(marks, axis, size, slice(at, at + out[d]))
        elif at is None or isinstance(at, float) or out[d] > 1:
            marks = union_along(
                marks, [axis]
            )  # any entry may be picked, so all contribute
        else:
            # The i-th trip of a loop picks the i-th entry.
            trips, most = full(marks, at.axis, at.size), min(at.size, size)
            rows = ((slice(i, i + 1), trips.take([i], at.axis)) for i in range(most))
            rows = [placed(row, axis, size, place) for place, row in rows]
            marks = np.concatenate(rows, at.axis)
            marks = placed(marks, at.axis, at.size, slice(0, most))
    return marks


@_rule("dynamic_update_slice scatter scatter-add scatter_add")
def _update(op: Op) -> Moves:
    """Returns the moves of a sum whose second summand may be anywhere in the result."""
    i = 1 if op.eqn.name == "dynamic_update_slice" else 2
    return [(0, lambda marks: marks), (i, op.through(_same(op.ins[i], op.out)))]


@_rule("gather")
def _gather(op: Op) -> Moves:
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(op.ins[0])) if d not in gone]
    to: list[int | None] = [None] * len(op.ins[0])
    for d, eqn in zip(kept, numbers.offset_dims, strict=True):
        to[d] = eqn
    rest = [d for d in range(len(op.out)) if d not in numbers.offset_dims]
    batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    for d, j in zip(*batch, strict=True):
        to[d] = rest[j]  # batch dimensions, as `vmap` makes them
    # A single index is a slice; one index per token is not.
    index = op.eqn.inputs()[1]
    starts = dict.fromkeys(numbers.start_index_map, index)
    is_slice = len(numbers.offset_dims) == len(op.out)
    after = tuple(
        n if d in numbers.operand_batching_dims else sizes[d]
        for d, n in enumerate(op.ins[0])
    )

    def move(marks: Marks) -> Marks:
        marks = moved(marks, op.lead, to)
        if len(starts) == 1 and (is_slice or index.number is not None):
            return small(_picked(marks, op, starts, after))
        cut = [d for d in starts if after[d] != op.ins[0][d]]
        return small(union_along(marks, [op.lead + d for d in cut]))

    return [(0, move)]


# Products: each dimension of an operand goes to one of the result, or to none.

PRODUCTS = names("dot_general ragged_dot_general ragged_dot conv_general_dilated")


@_rule(" ".join(PRODUCTS))
def _product(op: Op) -> Moves:
    return [(i, op.through(to)) for i, to in enumerate(op.eqn.to)]


def sides(eqn: Any) -> list[list[int | None]]:
    """Returns the dimension of the result that each dimension of an operand becomes.

    Dimensions that are summed over, or that pick a group's matrix, map to `None`.
    """
    if eqn.primitive.name == "conv_general_dilated":
        return _sides_of_conv(eqn)
    params, groups, first = eqn.params, (), []
    if "ragged_dot_dimension_numbers" in params:
        numbers = params["ragged_dot_dimension_numbers"]
        groups = numbers.rhs_group_dimensions
        (ca, cb), (ba, bb) = numbers.dot_dimension_numbers
        if {*numbers.lhs_ragged_dimensions} & {*ca}:
            first = [-1]  # the result has a dimension of groups, each summed separately
    else:
        (ca, cb), (ba, bb) = params["dimension_numbers"]
    ranks = [len(shape_of(x)) for x in eqn.invars[:2]]
    free_a = [i for i in range(ranks[0]) if i not in (*ca, *ba)]
    free_b = [i for i in range(ranks[1]) if i not in (*cb, *bb, *groups)]
    # The result has batch dimensions first, then the free ones of each side.
    orders = [*first, *ba, *free_a], [*first, *bb, *[None] * len(free_a), *free_b]
    return [
        [order.index(i) if i in order else None for i in range(rank)]
        for order, rank in zip(orders, ranks, strict=True)
    ]


def _sides_of_conv(eqn: Any) -> list[list[int | None]]:
    numbers = eqn.params["dimension_numbers"]
    image: list[int | None] = [None] * len(shape_of(eqn.invars[0]))
    kernel: list[int | None] = [None] * len(shape_of(eqn.invars[1]))
    batch, feature, *_ = numbers.lhs_spec
    image[batch], out = numbers.out_spec[:2]
    kernel[numbers.rhs_spec[0]] = out
    # With one group per feature, features stay separate, as in Mamba and ConvNeXt.
    features = shape_of(eqn.invars[0])[feature], shape_of(eqn.outvars[0])[out]
    if eqn.params["feature_group_count"] > 1 and features[0] == features[1]:
        image[feature] = out
    return [image, kernel]


def shared(to: Sequence[Sequence[int | None]]) -> set[int]:
    """Returns the dimensions of a product that both operands have."""
    return {d for d in to[0] if d is not None} & {d for d in to[1] if d is not None}


# Collectives exchange data along the axes of a mesh, which are in the lead.


def _devices(op: Op) -> list[int]:
    names = jaxprs.axes_of(op.eqn.jaxpr_eqn)
    return [x.axis for x in op.eqn.frame.lead if x.of in names]


@_rule("psum psum_invariant psum2 pmax pmin")
def _summed(op: Op) -> Moves:
    """Returns the moves of a reduction to which all devices contribute."""
    return [(op.k, lambda marks: union_along(marks, _devices(op)))]


@_rule("all_gather all_gather_invariant")
def _gathered(op: Op) -> Moves:
    return _exchanged(op, op.params["all_gather_dimension"], None)


@_rule("psum_scatter reduce_scatter")
def _scattered(op: Op) -> Moves:
    return _exchanged(op, None, op.params["scatter_dimension"])


@_rule("all_to_all")
def _transposed(op: Op) -> Moves:
    return _exchanged(op, op.params["concat_axis"], op.params["split_axis"])


def _exchanged(op: Op, joins: int | None, split: int | None) -> Moves:
    """Returns the moves of an exchange of blocks between devices.

    A device has one block for each device along `split`, or the same for all. It gets
    one from each device along `joins`, or their sum.
    """
    devices, block = _devices(op), list(op.ins[0])
    count = math.prod(x.size for x in op.eqn.frame.lead if x.axis in devices)
    if split is not None:
        block[split : split + 1] = [block[split] // count] * bool(op.params["tiled"])
    axis = op.lead + (joins if joins is not None else split or 0)

    def apart(d: int) -> Shape:
        return (*block[:d], count, *block[d:])

    def move(marks: Marks) -> Marks:
        if joins is None:
            marks = np.expand_dims(marks, axis)
        else:
            marks = reshaped(marks, op.lead, op.out, apart(joins))
        if split is None or len(devices) != 1:
            marks = union_along(marks, devices)
        if len(devices) != 1:
            marks = union_along(marks, [axis])
        else:  # the blocks that a device got become those of the devices that sent them
            marks = marks.swapaxes(devices[0], axis)
        if split is None:
            return small(marks.squeeze(axis))
        marks = np.moveaxis(marks, axis, op.lead + split)
        return reshaped(marks, op.lead, apart(split), op.ins[0])

    return [(0, move)]


RANDOM = names(
    "random_bits random_seed random_wrap random_unwrap random_fold_in random_clone "
    "threefry2x32"
)

#: Primitives through which parameters and attention can still be followed.
KNOWN = RANDOM.union(_MOVES) | names(
    "iota reduce_and reduce_or reduce_prod reduce_xor argmax argmin top_k "
    "approx_top_k sort axis_index cumprod"
)

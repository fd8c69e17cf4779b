"""The table of primitives: all that the reading knows about each of them.

A row says what a primitive computes (its kind), how marks go back through it, and how
to compute it where its operands are known numbers. All passes of the reading ask the
kind. To teach the reading a primitive, add its name to a row, or add a row.

Marks go back to every operand in which a result is linear. Linear for positive factors,
as a maximum is, is enough: QK-Clip's factors are positive. The reading cannot follow a
primitive without a row; the reading names it if it matters.
"""

import enum
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import jaxprs
from .jaxprs import shape_of
from .marks import (
    full,
    Marks,
    moved,
    nothing,
    placed,
    reshaped,
    Shape,
    small,
    union_along,
    union_of,
)


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


#: A function that returns the moves of one result of an equation.
Rule = Callable[[Op], Moves]


def moves(eqn: Any, k: int) -> Moves:
    """Returns how the marks of the `k`-th result go back to each operand.

    A product has a move for each of its two operands, since it is linear in each. The
    list is empty for a primitive without a rule.
    """
    if k not in eqn.known_moves:
        op = Op(eqn, k, eqn.output(k).shape, [x.shape for x in eqn.inputs()])
        row = TABLE.get(eqn.name)
        eqn.known_moves[k] = row.moves(op) if row else []
    return eqn.known_moves[k]


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


def _reshape(op: Op) -> Moves:
    return [(0, lambda marks: reshaped(marks, op.lead, op.out, op.ins[0]))]


def _transpose(op: Op) -> Moves:
    order = op.params["permutation"]
    return [(0, op.through([order.index(i) for i in range(len(op.out))]))]


def _broadcast(op: Op) -> Moves:
    at = zip(op.ins[0], op.params["broadcast_dimensions"], strict=True)
    return [(0, op.through([d if n == op.out[d] else None for n, d in at]))]


def _tile(op: Op) -> Moves:
    apart = tuple(itertools.chain(*zip(op.params["reps"], op.ins[0], strict=True)))

    def move(marks: Marks) -> Marks:
        marks = reshaped(marks, op.lead, op.out, apart)
        return small(moved(marks, op.lead, range(1, len(apart), 2)))

    return [(0, move)]


def _reduce(op: Op) -> Moves:
    """Returns the moves of an operation that reduces its axes to one entry."""
    left, axes = itertools.count(), op.eqn.axes
    own = range(len(op.ins[0]))
    return [(0, op.through([None if i in axes else next(left) for i in own]))]


def _mixing(op: Op) -> Moves:
    """Returns the moves of an operation that mixes entries along its axes."""
    if op.k >= len(op.ins):
        return []  # indices
    axes, dims = op.eqn.axes, range(len(op.out))
    return [(op.k, op.through([None if d in axes else d for d in dims]))]


def _windows(op: Op) -> Moves:
    """Returns the moves of a sum or maximum over the entries of windows."""
    keys = ("window_dimensions", "window_strides", "padding")
    keys += ("base_dilation", "window_dilation")
    windows = list(zip(*(op.params[key] for key in keys), strict=True))

    def move(marks: Marks) -> Marks:
        for d, window in enumerate(windows):
            if marks.shape[op.lead + d] > 1:
                marks = _unpooled(marks, op.lead + d, op.ins[0][d], *window)
        return small(marks)

    return [(0, move)]


def _unpooled(
    marks: Marks,
    axis: int,
    size: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    base_dilation: int,
    window_dilation: int,
) -> Marks:
    """Returns the marks along an axis that windows of some entries were taken from."""
    before = np.moveaxis(marks, axis, 0)
    after = np.full((size, *before.shape[1:]), nothing(marks), marks.dtype)
    starts = np.arange(len(before)) * stride - padding[0]
    for i in range(window):
        at, gap = np.divmod(starts + i * window_dilation, base_dilation)
        inside = (gap == 0) & (at >= 0) & (at < size)  # not padding, nor a gap
        after[at[inside]] = union_of(after[at[inside]], before[inside])
    return np.moveaxis(after, 0, axis)


def _rev(op: Op) -> Moves:
    axes = [op.lead + d for d in op.params["dimensions"]]
    return [(0, lambda x: np.flip(x, tuple(a for a in axes if x.shape[a] > 1)))]


# Primitives that take entries from some places, or put them there.


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


def _update(op: Op) -> Moves:
    """Returns the moves of a sum whose second summand may be anywhere in the result."""
    i = 1 if op.eqn.name == "dynamic_update_slice" else 2
    return [(0, lambda marks: marks), (i, op.through(_same(op.ins[i], op.out)))]


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


def _product(op: Op) -> Moves:
    return [(i, op.through(to)) for i, to in enumerate(op.eqn.to)]


def _convolution(op: Op) -> Moves:
    """Returns the moves of a convolution; groups of features stay apart."""
    (image, kernel), numbers = op.eqn.to, op.params["dimension_numbers"]
    feature, out = numbers.lhs_spec[1], numbers.out_spec[1]
    groups, features = op.params["feature_group_count"], op.ins[0][feature]
    to = [out if d == feature and groups > 1 else x for d, x in enumerate(image)]

    def move(marks: Marks) -> Marks:
        axis = op.lead + out
        if groups > 1 and (n := marks.shape[axis]) > 1:
            shape = marks.shape[:axis], marks.shape[axis + 1 :]
            marks = marks.reshape((*shape[0], groups, n // groups, *shape[1]))
            marks = union_along(marks, [axis + 1]).squeeze(axis + 1)
            marks = np.repeat(marks, features // groups, axis)
        return small(moved(marks, op.lead, to))

    return [(0, move), (1, op.through(kernel))]


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


def _summed(op: Op) -> Moves:
    """Returns the moves of a reduction to which all devices contribute."""
    return [(op.k, lambda marks: union_along(marks, _devices(op)))]


def _gathered(op: Op) -> Moves:
    return _exchanged(op, op.params["all_gather_dimension"], None)


def _scattered(op: Op) -> Moves:
    return _exchanged(op, None, op.params["scatter_dimension"])


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


def _nowhere(op: Op) -> Moves:
    """Returns no moves: entries of the result are linear in no operand."""
    return []


# The table.


class Kind(enum.Enum):
    """What a primitive computes. Each pass of the reading treats a kind in one way."""

    # Entries of one operand, or of several, as they are:
    SAME = "the same entries, possibly in another dtype, shape or place"
    REPEATED = "entries repeated along new dimensions"
    PERMUTED = "entries in another order, or from other devices"
    CUT = "entries from places that the equation names"
    PICKED = "entries from places that an operand names"
    JOINED = "entries of several operands side by side, or of one in another"
    CHOICE = "for each entry one of several operands"
    STOPPED = "the same entries, through which no gradient goes"
    # Entry by entry:
    LINEAR = "a linear function"
    SUM = "a sum"
    DIFFERENCE = "a difference"
    LARGER = "the larger or the smaller of two"
    PRODUCT = "a product"
    QUOTIENT = "a quotient"
    EXPONENTIAL = "an exponential"
    LOGARITHM = "a logarithm"
    POWER = "a power with a fixed exponent, which may divide"
    SOFTCAP = "a hyperbolic tangent, which caps logits"
    BENT = "any other function, which is not linear"
    EQUAL = "whether two entries are equal"
    # Of many entries:
    CONTRACTION = "a product that sums over pairs of dimensions"
    TOTAL = "a sum along dimensions, whole or running"
    SCATTERED = "a sum of entries at places that an operand names"
    MIXED = "a linear function of all entries along dimensions"
    LOG_TOTAL = "the logarithm of a running sum of exponentials"
    FOLDED = "a product of all entries along dimensions"
    EXTREME = "a maximum or a minimum, whole or running"
    ORDER = "entries in the order of their values, or their places"
    WINNER = "the place of a maximum or a minimum"
    EXCHANGED = "a sum over devices, or an exchange between them"
    ALGEBRA = "linear algebra, which may hide a parameter but hides no attention"
    # Of no entries:
    COUNTER = "0, 1, 2, ..."
    GENERATED = "random numbers, or the number of a device"
    UNKNOWN = "anything: the table has no row for the primitive"

    @property
    def is_known(self) -> bool:
        """Whether parameters and attention can still be followed through it."""
        return self not in (Kind.ALGEBRA, Kind.UNKNOWN)

    @property
    def is_bent(self) -> bool:
        """Whether it is not linear in an operand, whatever the others are."""
        return self in _BENT


_BENT = {Kind.EXPONENTIAL, Kind.LOGARITHM, Kind.POWER, Kind.SOFTCAP, Kind.BENT}
_BENT |= {Kind.EQUAL, Kind.FOLDED, Kind.LOG_TOTAL}


#: A function from an equation's parameters and its operand's rank to dimensions.
Axes = Callable[[dict[str, Any], int], Iterable[int]]


def _none(params: dict[str, Any], rank: int) -> Iterable[int]:
    return ()


def _each(parameter: str) -> Axes:
    """Returns the axes that a parameter lists."""
    return lambda params, rank: params[parameter]


def _one(parameter: str) -> Axes:
    """Returns the axis that a parameter names."""
    return lambda params, rank: (params[parameter],)


def _last(params: dict[str, Any], rank: int) -> Iterable[int]:
    """Returns the axes of a Fourier transform, which are the last ones."""
    return range(rank - len(params["fft_lengths"]), rank)


def _windowed(params: dict[str, Any], rank: int) -> Iterable[int]:
    """Returns the axes along which windows have several entries."""
    return (d for d, n in enumerate(params["window_dimensions"]) if n > 1)


class Row(NamedTuple):
    """All that the reading knows of some primitives.

    - `names`: the primitives, by their `.name`, separated by spaces.
    - `kind`: what they compute.
    - `axes`: the dimensions of the operand along which they combine entries.
    - `moves`: how marks go back from a result to the operands.
    - `number`: the function of numbers that they compute, or `None` if the reading does
        not compute it, or if the kind takes a number as it is.
    """

    names: str
    kind: Kind
    axes: Axes
    moves: Rule
    number: Callable[..., Any] | None


_ROWS = (
    Row(
        "convert_element_type copy copy_p reduce_precision pvary pcast mesh_cast "
        "reshard sharding_constraint sharding_barrier layout_constraint device_put "
        "pbroadcast name",
        Kind.SAME,
        _none,
        _entrywise,
        None,
    ),
    Row("reshape squeeze expand_dims", Kind.SAME, _none, _reshape, None),
    Row("broadcast_in_dim", Kind.REPEATED, _none, _broadcast, None),
    Row("tile", Kind.REPEATED, _none, _tile, None),
    Row("transpose", Kind.PERMUTED, _none, _transpose, None),
    Row("rev", Kind.PERMUTED, _none, _rev, None),
    # Several operands go through a barrier, each to a result of its own.
    Row("ppermute optimization_barrier", Kind.PERMUTED, _none, _entrywise, None),
    Row("slice", Kind.CUT, _none, _slice, None),
    Row("split unstack", Kind.CUT, _none, _split, None),
    Row("dynamic_slice", Kind.PICKED, _none, _dynamic_slice, None),
    Row("gather", Kind.PICKED, _none, _gather, None),
    Row("concatenate stack", Kind.JOINED, _none, _concatenate, None),
    Row("pad", Kind.JOINED, _none, _pad, None),
    Row("dynamic_update_slice scatter", Kind.JOINED, _none, _update, None),
    Row("select_n", Kind.CHOICE, _none, _entrywise, lambda i, *cases: cases[int(i)]),
    Row("stop_gradient", Kind.STOPPED, _none, _entrywise, None),
    Row("neg", Kind.LINEAR, _none, _entrywise, operator.neg),
    Row(
        "real imag conj complex abs nextafter bitcast_convert_type",
        Kind.LINEAR,
        _none,
        _entrywise,
        None,
    ),
    Row("add add_any", Kind.SUM, _none, _entrywise, operator.add),
    Row("sub", Kind.DIFFERENCE, _none, _entrywise, operator.sub),
    Row("max", Kind.LARGER, _none, _entrywise, max),
    Row("min", Kind.LARGER, _none, _entrywise, min),
    Row("mul", Kind.PRODUCT, _none, _entrywise, operator.mul),
    Row("div", Kind.QUOTIENT, _none, _entrywise, lambda a, b: a / b if b else None),
    Row("exp exp2 pow", Kind.EXPONENTIAL, _none, _entrywise, None),
    Row("log log1p", Kind.LOGARITHM, _none, _entrywise, None),
    Row("integer_pow", Kind.POWER, _none, _entrywise, None),
    Row("tanh", Kind.SOFTCAP, _none, _entrywise, None),
    Row("lt", Kind.BENT, _none, _entrywise, operator.lt),
    Row("ge", Kind.BENT, _none, _entrywise, operator.ge),
    Row(
        "clamp",
        Kind.BENT,
        _none,
        _entrywise,
        lambda low, x, high: min(max(x, low), high),
    ),
    Row(
        "square sqrt rsqrt cbrt expm1 logistic sign floor ceil round rem is_finite "
        "erf erfc erf_inv sin cos tan sinh cosh asin acos atan atan2 asinh acosh atanh "
        "lgamma digamma igamma igammac bessel_i0e bessel_i1e polynomial "
        "regularized_incomplete_beta ne le gt eq_to le_to lt_to not and or xor "
        "shift_left shift_right_logical shift_right_arithmetic population_count",
        Kind.BENT,
        _none,
        _entrywise,
        None,
    ),
    Row("eq", Kind.EQUAL, _none, _entrywise, None),
    Row(
        "dot_general ragged_dot_general ragged_dot",
        Kind.CONTRACTION,
        _none,
        _product,
        None,
    ),
    Row("conv_general_dilated", Kind.CONTRACTION, _none, _convolution, None),
    Row("reduce_sum", Kind.TOTAL, _each("axes"), _reduce, None),
    Row("cumsum", Kind.TOTAL, _one("axis"), _mixing, None),
    Row("reduce_window_sum", Kind.TOTAL, _windowed, _windows, None),
    Row("scatter-add scatter_add", Kind.SCATTERED, _none, _update, None),
    Row("fft", Kind.MIXED, _last, _mixing, None),
    Row("reduce_prod reduce_xor", Kind.FOLDED, _each("axes"), _reduce, None),
    Row("cumprod", Kind.FOLDED, _one("axis"), _mixing, None),
    Row("cumlogsumexp", Kind.LOG_TOTAL, _one("axis"), _mixing, None),
    Row("reduce_max reduce_min", Kind.EXTREME, _each("axes"), _reduce, None),
    Row("reduce_and reduce_or", Kind.EXTREME, _each("axes"), _reduce, None),
    Row("cummax cummin", Kind.EXTREME, _one("axis"), _mixing, None),
    Row("reduce_window_max reduce_window_min", Kind.EXTREME, _windowed, _windows, None),
    Row("scatter-max scatter-min", Kind.EXTREME, _none, _update, None),
    Row("pmax pmin", Kind.EXTREME, _none, _summed, None),
    Row("sort", Kind.ORDER, _one("dimension"), _mixing, None),
    Row("top_k", Kind.ORDER, _one("axis"), _mixing, None),
    Row("approx_top_k", Kind.ORDER, _one("reduction_dimension"), _mixing, None),
    Row("argmax argmin", Kind.WINNER, _each("axes"), _nowhere, None),
    Row("psum psum_invariant psum2", Kind.EXCHANGED, _none, _summed, None),
    Row("all_gather all_gather_invariant", Kind.EXCHANGED, _none, _gathered, None),
    Row("psum_scatter reduce_scatter", Kind.EXCHANGED, _none, _scattered, None),
    Row("all_to_all", Kind.EXCHANGED, _none, _transposed, None),
    Row(
        "triangular_solve cholesky lu lu_pivots_to_permutation qr householder_product "
        "eigh eig svd schur tridiagonal tridiagonal_solve custom_linear_solve geqrf "
        "ormqr geqp3 hessenberg",
        Kind.ALGEBRA,
        _none,
        _nowhere,
        None,
    ),
    Row("iota", Kind.COUNTER, _none, _nowhere, None),
    Row(
        "random_bits random_seed random_wrap random_unwrap random_fold_in random_clone "
        "random_split rng_bit_generator threefry2x32 axis_index",
        Kind.GENERATED,
        _none,
        _nowhere,
        None,
    ),
)

#: The row of each primitive, by its name.
TABLE = {name: row for row in _ROWS for name in row.names.split()}


def kind_of(name: str) -> Kind:
    """Returns what a primitive computes, by its name."""
    return TABLE[name].kind if name in TABLE else Kind.UNKNOWN

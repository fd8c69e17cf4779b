"""How marks go back through each primitive: which entries of its operands contribute.

A rule covers every operand whose entries change a result, linearly or not; the kind of
a primitive says in which operands it is linear. The table of primitives names the rule
of each.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import jaxprs
from .jaxprs import shape_of
from .marks import (
    Marks,
    moved,
    nothing,
    only_where,
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
MoveRule = Callable[[Op], Moves]


def entrywise(op: Op) -> Moves:
    """Returns the moves of an entry-by-entry operation, possibly a broadcast."""
    operands = range(len(op.ins))
    if len(op.eqn.jaxpr_eqn.outvars) > 1:  # a result for each operand
        operands = [op.k]
    return [(i, op.through(_same(op.ins[i], op.out))) for i in operands]


def select(op: Op) -> Moves:
    """Returns the moves to the cases; each is taken in the trips that choose it."""
    which = op.eqn.inputs()[0].value
    is_known = which is not None and math.prod(which.shape[op.lead :]) == 1

    def case(i: int) -> Move:
        through = op.through(_same(op.ins[i], op.out))
        if which is None or not is_known:
            return through
        is_taken = which.astype(int) == i - 1
        is_taken = is_taken.reshape((*which.shape[: op.lead], *[1] * len(op.out)))
        return lambda marks: through(only_where(marks, is_taken))

    return [(i, case(i)) for i in range(1, len(op.ins))]


def _same(shape: Shape, out: Shape) -> list[int | None]:
    """Returns the result's dimension for each of an operand; `None` if broadcast."""
    if len(shape) != len(out):
        return [None] * len(shape)
    return [d if n == out[d] else None for d, n in enumerate(shape)]


def reshape(op: Op) -> Moves:
    shape = op.ins[0]
    order = op.params.get("dimensions") if op.eqn.name == "reshape" else None
    if order is None:
        return [(0, lambda marks: reshaped(marks, op.lead, op.out, shape))]
    # A transpose comes before it, as `vmap` of a convolution makes.
    turned = tuple(shape[d] for d in order)
    back = [*range(op.lead), *(op.lead + order.index(d) for d in range(len(shape)))]
    return [(0, lambda marks: reshaped(marks, op.lead, op.out, turned).transpose(back))]


def transpose(op: Op) -> Moves:
    order = op.params["permutation"]
    return [(0, op.through([order.index(i) for i in range(len(op.out))]))]


def broadcast(op: Op) -> Moves:
    dims = zip(op.ins[0], op.params["broadcast_dimensions"], strict=True)
    return [(0, op.through([d if n == op.out[d] else None for n, d in dims]))]


def tile(op: Op) -> Moves:
    apart = tuple(itertools.chain(*zip(op.params["reps"], op.ins[0], strict=True)))

    def move(marks: Marks) -> Marks:
        marks = reshaped(marks, op.lead, op.out, apart)
        return small(moved(marks, op.lead, range(1, len(apart), 2)))

    return [(0, move)]


def reduce(op: Op) -> Moves:
    """Returns the moves of an operation that reduces its axes to one entry."""
    out_dims, axes = itertools.count(), op.eqn.axes
    dims = range(len(op.ins[0]))
    return [(0, op.through([None if i in axes else next(out_dims) for i in dims]))]


def mixing(op: Op) -> Moves:
    """Returns the moves of an operation that mixes entries along its axes."""
    if op.k >= len(op.ins):
        return []  # indices
    axes, dims = op.eqn.axes, range(len(op.out))
    return [(op.k, op.through([None if d in axes else d for d in dims]))]


def windows(op: Op) -> Moves:
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
        places, gap = np.divmod(starts + i * window_dilation, base_dilation)
        inside = (gap == 0) & (places >= 0) & (places < size)  # not padding, nor a gap
        after[places[inside]] = union_of(after[places[inside]], before[inside])
    return np.moveaxis(after, 0, axis)


def rev(op: Op) -> Moves:
    axes = [op.lead + d for d in op.params["dimensions"]]
    return [(0, lambda x: np.flip(x, tuple(a for a in axes if x.shape[a] > 1)))]


# Products: each dimension of an operand goes to one of the result, or to none.


def product(op: Op) -> Moves:
    return [(i, op.through(to)) for i, to in enumerate(op.eqn.to)]


def convolution(op: Op) -> Moves:
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
    return [x.axis for x in op.eqn.frame.lead if x.name in names]


def over_devices(op: Op) -> Moves:
    """Returns the moves of a reduction to which all devices contribute."""
    return [(op.k, lambda marks: union_along(marks, _devices(op)))]


def all_gather(op: Op) -> Moves:
    return _exchanged(op, op.params["all_gather_dimension"], None)


def reduce_scatter(op: Op) -> Moves:
    return _exchanged(op, None, op.params["scatter_dimension"])


def all_to_all(op: Op) -> Moves:
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


def nowhere(op: Op) -> Moves:
    """Returns no moves: a result depends on no entries, or nothing shows on which."""
    return []

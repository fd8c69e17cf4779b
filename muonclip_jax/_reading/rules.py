"""How marks go back through each primitive: which entries of its operands contribute.

A rule covers every operand whose entries change a result, linearly or not; the kind of
a primitive says in which operands it is linear. The table of primitives says which rule
is whose.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import jaxprs
from .jaxprs import shape_of
from .marks import (
    full,
    Marks,
    moved,
    nothing,
    only_where,
    placed,
    placed_at,
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


def entrywise(op: Op) -> Moves:
    """Returns the moves of an entry-by-entry operation, possibly a broadcast."""
    own = range(len(op.ins))
    if len(op.eqn.jaxpr_eqn.outvars) > 1:  # a result for each operand
        own = [op.k]
    return [(i, op.through(_same(op.ins[i], op.out))) for i in own]


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


def _same(of: Shape, out: Shape) -> list[int | None]:
    """Returns the result's dimension for each of an operand; `None` if broadcast."""
    if len(of) != len(out):
        return [None] * len(of)
    return [d if n == out[d] else None for d, n in enumerate(of)]


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
    at = zip(op.ins[0], op.params["broadcast_dimensions"], strict=True)
    return [(0, op.through([d if n == op.out[d] else None for n, d in at]))]


def tile(op: Op) -> Moves:
    apart = tuple(itertools.chain(*zip(op.params["reps"], op.ins[0], strict=True)))

    def move(marks: Marks) -> Marks:
        marks = reshaped(marks, op.lead, op.out, apart)
        return small(moved(marks, op.lead, range(1, len(apart), 2)))

    return [(0, move)]


def reduce(op: Op) -> Moves:
    """Returns the moves of an operation that reduces its axes to one entry."""
    left, axes = itertools.count(), op.eqn.axes
    own = range(len(op.ins[0]))
    return [(0, op.through([None if i in axes else next(left) for i in own]))]


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
        at, gap = np.divmod(starts + i * window_dilation, base_dilation)
        inside = (gap == 0) & (at >= 0) & (at < size)  # not padding, nor a gap
        after[at[inside]] = union_of(after[at[inside]], before[inside])
    return np.moveaxis(after, 0, axis)


def rev(op: Op) -> Moves:
    axes = [op.lead + d for d in op.params["dimensions"]]
    return [(0, lambda x: np.flip(x, tuple(a for a in axes if x.shape[a] > 1)))]


# Primitives that take entries from some places, or put them there.


def static_slice(op: Op) -> Moves:
    starts, steps = op.params["start_indices"], op.params["strides"]
    steps = steps or (1,) * len(op.out)

    def move(marks: Marks) -> Marks:
        for d, (start, step, n) in enumerate(zip(starts, steps, op.out, strict=True)):
            if op.ins[0][d] != n:
                at = slice(start, start + (n - 1) * step + 1, step)
                marks = placed(marks, op.lead + d, op.ins[0][d], at)
        return marks

    return [(0, move)]


def split(op: Op) -> Moves:
    axis = op.params["axis"]
    size = op.ins[0][axis]
    sizes = op.params.get("sizes", (1,) * size)
    at = slice(sum(sizes[: op.k]), sum(sizes[: op.k + 1]))

    def move(marks: Marks) -> Marks:
        if op.eqn.name == "unstack":  # the result lacks the axis
            marks = np.expand_dims(marks, op.lead + axis)
        return placed(marks, op.lead + axis, size, at)

    return [(0, move)]


def concatenate(op: Op) -> Moves:
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


def pad(op: Op) -> Moves:
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


def dynamic_slice(op: Op) -> Moves:
    ones = [1] * len(op.out)
    values = (x.value for x in op.eqn.inputs()[1:])
    starts = [None if x is None else x.reshape((*x.shape, *ones)) for x in values]
    return [(0, lambda marks: small(_picked(marks, op.ins[0], op.out, starts)))]


def _picked(
    marks: Marks, of: Shape, sizes: Shape, starts: Sequence[np.ndarray | None]
) -> Marks:
    """Returns the marks of the operand that entries were picked from.

    `starts` has the first place along each dimension, with the axes of the marks; it is
    `None` where the place is not known. The last axes of the marks are the dimensions.
    """
    for d, (start, n, size) in enumerate(zip(starts, sizes, of, strict=True)):
        axis = marks.ndim - len(of) + d
        if n == size:
            continue
        if start is None:  # any entry may be picked, so all contribute
            marks = union_along(marks, [axis])
            continue
        # XLA moves a slice that would end outside back inside.
        first = np.clip(start, 0, size - n)
        if first.size == 1:
            at = int(first.item())
            marks = placed(marks, axis, size, slice(at, at + n))
        else:
            within = [-1 if a == axis else 1 for a in range(marks.ndim)]
            at = first + np.arange(n).reshape(within)
            marks = placed_at(full(marks, axis, n), axis, size, at)
    return marks


def update_slice(op: Op) -> Moves:
    ones = [1] * len(op.out)
    values = (x.value for x in op.eqn.inputs()[2:])
    starts = [None if x is None else x.reshape((*x.shape, *ones)) for x in values]

    def update(marks: Marks) -> Marks:
        return small(_window(marks, op.out, op.ins[1], starts))

    return [(0, _around(op, starts, op.ins[1], 0)), (1, update)]


def scatter(op: Op) -> Moves:
    """Returns the moves of a sum; the second summand is somewhere in the result.

    The axes of `starts` are those of the lead, then of the indices, then of the result.
    """
    numbers, lead, out = op.params["dimension_numbers"], op.lead, op.out
    index, new = op.eqn.inputs()[1].value, op.ins[2]
    own = numbers.update_window_dims
    batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    gone = {*numbers.inserted_window_dims}
    kept = [d for d in range(len(out)) if d not in (*gone, *batch[0])]
    at = dict(zip(kept, own, strict=True))
    if batch[0]:  # as `vmap` makes them: then the places of all other entries are lost
        rest = [d for d in range(len(new)) if d not in own]
        whole = {u: d for d, u in at.items() if new[u] == out[d]}
        whole |= {rest[j]: d for d, j in zip(*batch, strict=True)}
        to = [whole.get(d) for d in range(len(new))]
        return [(0, lambda marks: marks), (2, op.through(to))]
    sizes = tuple(new[at[d]] if d in at else 1 for d in range(len(out)))
    rest = [d for d in range(len(new)) if d not in own]
    free = len(rest)
    starts: list[np.ndarray | None] = [None] * len(out)
    if index is not None:
        index = full(index, index.ndim - 1, len(numbers.scatter_dims_to_operand_dims))
        order = [*range(free), *[None] * len(out)]
        for i, d in enumerate(numbers.scatter_dims_to_operand_dims):
            starts[d] = _spread(index[..., i], lead, order)

    def update(marks: Marks) -> Marks:
        marks = np.expand_dims(marks, tuple(range(lead, lead + free)))
        marks = _window(marks, out, sizes, starts)
        marks = marks.squeeze(tuple(lead + free + d for d in gone))
        # Now the axes are the indices', then those of the window.
        axes = [
            rest.index(d) if d in rest else free + own.index(d) for d in range(len(new))
        ]
        return small(marks.transpose([*range(lead), *(lead + a for a in axes)]))

    is_sum = op.eqn.name != "scatter"
    return [
        (0, (lambda marks: marks) if is_sum else _around(op, starts, sizes, free)),
        (2, update),
    ]


def _window(
    marks: Marks, of: Shape, sizes: Shape, starts: Sequence[np.ndarray | None]
) -> Marks:
    """Returns the marks of a window of an array; `starts` is as for `_picked`."""
    for d, (start, n, size) in enumerate(zip(starts, sizes, of, strict=True)):
        axis = marks.ndim - len(of) + d
        if n == size or marks.shape[axis] == 1:
            continue
        if start is None:
            marks = union_along(marks, [axis])
            continue
        within = np.arange(n).reshape(
            [-1 if a == axis else 1 for a in range(marks.ndim)]
        )
        places = np.clip(start, 0, size - n) + within
        others = ((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in (marks, places))
        shape = np.broadcast_shapes(*others)
        rows, places = (
            np.broadcast_to(x, (*shape[:axis], x.shape[axis], *shape[axis + 1 :]))
            for x in (marks, places)
        )
        marks = np.take_along_axis(rows, places, axis)
    return marks


def _around(
    op: Op, starts: Sequence[np.ndarray | None], sizes: Shape, free: int
) -> Move:
    """Returns the move to an array of which a window is overwritten."""
    cut = [d for d, n in enumerate(op.out) if sizes[d] < n]
    if not cut or any(starts[d] is None for d in cut):
        return lambda marks: marks
    ones = np.ones([1] * (op.lead + free + len(op.out)), object)
    gone = _picked(ones, op.out, sizes, starts)
    axes = tuple(range(op.lead, op.lead + free))
    is_left = union_along(gone, axes).squeeze(axes) == 0
    return lambda marks: only_where(marks, is_left) if is_left.any() else marks


def gather(op: Op) -> Moves:
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    of, lead = op.ins[0], op.lead
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(of)) if d not in gone]
    at = dict(zip(kept, numbers.offset_dims, strict=True))
    # The dimensions of the indices; `vmap` makes some that the operand has, too.
    rest = [d for d in range(len(op.out)) if d not in numbers.offset_dims]
    batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    paired = dict(zip(*batch, strict=True))
    at |= {d: rest[j] for d, j in paired.items()}
    free = [j for j in range(len(rest)) if j not in paired.values()]
    after = tuple(n if d in paired else sizes[d] for d, n in enumerate(of))
    # The axes are those of the lead, then of the indices, then of the operand.
    order = [*(rest[j] for j in free), *(at.get(d) for d in range(len(of)))]
    starts: list[np.ndarray | None] = [None] * len(of)
    if (index := index_of(op.eqn)) is not None:
        own = [*free, *(paired.get(d) for d in range(len(of)))]
        index = full(index, index.ndim - 1, len(numbers.start_index_map))
        for i, d in enumerate(numbers.start_index_map):
            starts[d] = _spread(index[..., i], lead, own)

    def move(marks: Marks) -> Marks:
        marks = _spread(marks, lead, order)
        marks = _picked(marks, of, after, starts)
        marks = union_along(marks, range(lead, lead + len(free)))
        return small(marks.squeeze(tuple(range(lead, lead + len(free)))))

    return [(0, move)]


def index_of(eqn: Any) -> np.ndarray | None:
    """Returns the indices of a gather, if it is known which rows they pick.

    Entries that are picked along several dimensions at once, as by a skew of relative
    positions, are no rows. They are followed along the whole dimensions.
    """
    numbers, index = eqn.jaxpr_eqn.params["dimension_numbers"], eqn.inputs()[1]
    is_one = len(numbers.offset_dims) == len(eqn.output().shape)
    is_row = len(numbers.start_index_map) == 1 and not numbers.operand_batching_dims
    return index.value if is_one or is_row else None


def _spread(x: np.ndarray, lead: int, order: Sequence[int | None]) -> np.ndarray:
    """Returns an array with its dimensions in an order, `None` for a new one."""
    axes = [lead + d for d in order if d is not None]
    sizes = iter(x.transpose([*range(lead), *axes]).shape[lead:])
    shape = [1 if d is None else next(sizes) for d in order]
    return x.transpose([*range(lead), *axes]).reshape((*x.shape[:lead], *shape))


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
    return [x.axis for x in op.eqn.frame.lead if x.of in names]


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
    """Returns no moves: it hides on which entries a result depends, or on none."""
    return []

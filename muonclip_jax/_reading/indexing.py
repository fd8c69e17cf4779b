"""How marks go back through primitives that take or put entries at some places.

Places are constants, or indices whose numbers may be known.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .back import Move, Moves, Op
from .marks import full, Marks, only_where, placed, placed_at, Shape, small, union_along


def static_slice(op: Op) -> Moves:
    starts, steps = op.params["start_indices"], op.params["strides"]
    steps = steps or (1,) * len(op.out)

    def move(marks: Marks) -> Marks:
        for d, (start, step, n) in enumerate(zip(starts, steps, op.out, strict=True)):
            if op.ins[0][d] != n:
                taken = slice(start, start + (n - 1) * step + 1, step)
                marks = placed(marks, op.lead + d, op.ins[0][d], taken)
        return marks

    return [(0, move)]


def split(op: Op) -> Moves:
    axis = op.params["axis"]
    size = op.ins[0][axis]
    sizes = op.params.get("sizes", (1,) * size)
    part = slice(sum(sizes[: op.k]), sum(sizes[: op.k + 1]))

    def move(marks: Marks) -> Marks:
        if op.eqn.name == "unstack":  # the result lacks the axis
            marks = np.expand_dims(marks, op.lead + axis)
        return placed(marks, op.lead + axis, size, part)

    return [(0, move)]


def concatenate(op: Op) -> Moves:
    is_new = op.eqn.name == "stack"  # makes the dimension, from JAX 0.12 on
    dim = op.params["axis" if is_new else "dimension"]
    sizes = (1 if is_new else x[dim] for x in op.ins)
    offsets, axis = list(itertools.accumulate(sizes, initial=0)), op.lead + dim

    def part(i: int) -> Move:
        def move(marks: Marks) -> Marks:
            marks = full(marks, axis, op.out[dim]).take(
                range(offsets[i], offsets[i + 1]), axis
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
    marks: Marks, shape: Shape, sizes: Shape, starts: Sequence[np.ndarray | None]
) -> Marks:
    """Returns the marks of the operand that entries were picked from.

    `starts` has the first place along each dimension, with the axes of the marks; it is
    `None` where the place is not known. The last axes of the marks are the dimensions.
    """
    for d, (start, n, size) in enumerate(zip(starts, sizes, shape, strict=True)):
        axis = marks.ndim - len(shape) + d
        if n == size:
            continue
        if start is None:  # any entry may be picked, so all contribute
            marks = union_along(marks, [axis])
            continue
        # XLA moves a slice that would end outside back inside.
        first = np.clip(start, 0, size - n)
        if first.size == 1:
            place = int(first.item())
            marks = placed(marks, axis, size, slice(place, place + n))
        else:
            within = [-1 if a == axis else 1 for a in range(marks.ndim)]
            places = first + np.arange(n).reshape(within)
            marks = placed_at(full(marks, axis, n), axis, size, places)
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

    `starts` has the axes of the lead, then of the indices, then of the result.
    """
    numbers, lead, out = op.params["dimension_numbers"], op.lead, op.out
    index, new = op.eqn.inputs()[1].value, op.ins[2]
    window_dims = numbers.update_window_dims
    batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    gone = {*numbers.inserted_window_dims}
    kept = [d for d in range(len(out)) if d not in (*gone, *batch[0])]
    update_of = dict(zip(kept, window_dims, strict=True))
    rest = [d for d in range(len(new)) if d not in window_dims]
    if batch[0]:  # as `vmap` makes them: then the places of all other entries are lost
        whole = {u: d for d, u in update_of.items() if new[u] == out[d]}
        whole |= {rest[j]: d for d, j in zip(*batch, strict=True)}
        to = [whole.get(d) for d in range(len(new))]
        return [(0, lambda marks: marks), (2, op.through(to))]
    sizes = tuple(new[update_of[d]] if d in update_of else 1 for d in range(len(out)))
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
        # The axes are now those of the indices, then of the window.
        window_order = [*rest, *window_dims]
        axes = [window_order.index(d) for d in range(len(new))]
        return small(marks.transpose([*range(lead), *(lead + a for a in axes)]))

    is_sum = op.eqn.name != "scatter"
    return [
        (0, (lambda marks: marks) if is_sum else _around(op, starts, sizes, free)),
        (2, update),
    ]


def _window(
    marks: Marks, shape: Shape, sizes: Shape, starts: Sequence[np.ndarray | None]
) -> Marks:
    """Returns the marks of a window of an array; `starts` is as for `_picked`."""
    for d, (start, n, size) in enumerate(zip(starts, sizes, shape, strict=True)):
        axis = marks.ndim - len(shape) + d
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
        common = np.broadcast_shapes(*others)
        rows, places = (
            np.broadcast_to(x, (*common[:axis], x.shape[axis], *common[axis + 1 :]))
            for x in (marks, places)
        )
        marks = np.take_along_axis(rows, places, axis)
    return marks


def _around(
    op: Op, starts: Sequence[np.ndarray | None], sizes: Shape, free: int
) -> Move:
    """Returns the move to an array, part of which a window overwrites."""
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
    shape, lead = op.ins[0], op.lead
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(shape)) if d not in gone]
    result_of = dict(zip(kept, numbers.offset_dims, strict=True))
    # The dimensions of the indices; `vmap` makes some that the operand has, too.
    rest = [d for d in range(len(op.out)) if d not in numbers.offset_dims]
    batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    paired = dict(zip(*batch, strict=True))
    result_of |= {d: rest[j] for d, j in paired.items()}
    free = [j for j in range(len(rest)) if j not in paired.values()]
    window = tuple(n if d in paired else sizes[d] for d, n in enumerate(shape))
    # The marks get the axes of the lead, then of the indices, then of the operand.
    order = [*(rest[j] for j in free), *(result_of.get(d) for d in range(len(shape)))]
    starts: list[np.ndarray | None] = [None] * len(shape)
    if (index := index_of(op.eqn)) is not None:
        index_order = [*free, *(paired.get(d) for d in range(len(shape)))]
        index = full(index, index.ndim - 1, len(numbers.start_index_map))
        for i, d in enumerate(numbers.start_index_map):
            starts[d] = _spread(index[..., i], lead, index_order)

    def move(marks: Marks) -> Marks:
        marks = _spread(marks, lead, order)
        marks = _picked(marks, shape, window, starts)
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

"""Labels of arrays, and how they go back through an equation to its operands.

A label has one entry for every entry of an array, or one along dimensions where it does
not vary. From what each entry of a result is marked with follows what each entry of an
operand has a part in: the transpose of the operation, with a union in place of a sum.
So a mark for every head, put on the logits of attention, arrives at the parameters as
the heads that each of their entries serves.

In front of an array's own dimensions a label has one for every loop and every axis of a
mesh around it, its `lead`: along it are trips and devices. Marks are bits, of Python's
integers or of `int64`, joined by `or`; or floats, joined by their maximum.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .jaxprs import shape_of


Label = np.ndarray
Shape = tuple[int, ...]
#: From the label of a result to that of an operand.
Move = Callable[[Label], Label]


# Labels are not made larger to say where they end.
_LARGEST = 1 << 22


def nothing(label: Label) -> Any:
    """The mark of entries that have no part in anything."""
    return -np.inf if label.dtype.kind == "f" else 0


def joined(label: Label, axes: Iterable[int]) -> Label:
    """The union along axes, which stay with one entry."""
    join = np.maximum if label.dtype.kind == "f" else np.bitwise_or
    for axis in axes:
        if label.shape[axis] > 1:
            label = join.reduce(label, axis=axis, keepdims=True)
    return label


def either(a: Label, b: Label) -> Label:
    """The union of two labels of one array."""
    join = np.maximum if a.dtype.kind == "f" else np.bitwise_or
    return join(a, b)


def is_varied(label: Label, axis: int | None = None) -> bool:
    """Whether entries have different marks, those without any aside, along an axis."""
    if axis is not None:
        label = joined(label, [a for a in range(label.ndim) if a != axis])
    return len(set(label.ravel().tolist()) - {0}) > 1


def small(label: Label) -> Label:
    """The label with one entry along axes where all are the same."""
    for axis in range(label.ndim):
        if label.shape[axis] > 1:
            first = label.take([0], axis)
            if (label == first).all():
                label = first
    return label


def full(label: Label, axis: int, size: int) -> Label:
    """The label with all entries along an axis."""
    if label.shape[axis] == size:
        return label
    return np.repeat(label, size, axis)


def marks(rank: int, axis: int, size: int, exact: bool = False) -> Label:
    """A mark of its own for every entry along an axis.

    Exact ones are a bit each. The others have two bits for every binary digit of the
    entry's number, one of them set: so a union of different entries is no mark of one,
    in 64 bits, and where a label varies is seen at a size where exact ones are too long.
    """
    if exact:
        label = np.empty(size, object)
        label[:] = [1 << i for i in range(size)]
    else:
        numbers, label = np.arange(size), np.zeros(size, np.int64)
        for digit in range(max(1, (size - 1).bit_length())):
            label |= 1 << (2 * digit + (numbers >> digit & 1))
    return label.reshape([size if i == axis else 1 for i in range(rank)])


def placed(label: Label, axis: int, size: int, at: slice) -> Label:
    """The label of what a slice was taken from: nothing around it."""
    if label.shape[axis] == 1 and label.size * size > _LARGEST:
        return label  # around it, as well
    shape = [size if i == axis else n for i, n in enumerate(label.shape)]
    around = np.full(shape, nothing(label), label.dtype)
    around[(*[slice(None)] * axis, at)] = label
    return around


def moved(label: Label, lead: int, to: Sequence[int | None]) -> Label:
    """The label of an operand each of whose dimensions goes to one of the result.

    `None` where it is summed over or has one entry for many of the result's.
    """
    kept = [lead + d for d in to if d is not None]
    gone = [i for i in range(lead, label.ndim) if i not in kept]
    label = joined(label, gone).transpose([*range(lead), *kept, *gone])
    sizes = iter(label.shape[lead:])
    dims = [1 if d is None else next(sizes) for d in to]
    return label.reshape((*label.shape[:lead], *dims))


def reshaped(label: Label, lead: int, old: Shape, new: Shape) -> Label:
    """The label of an array of shape `new`, from that of one of shape `old`.

    Dimensions are grouped into the least runs of the same size on both sides; only
    where a label varies in a run does it get all the run's entries.
    """
    runs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        i2, j2 = min(i + 1, len(old)), min(j + 1, len(new))
        a, b = np.prod(old[i:i2], dtype=int), np.prod(new[j:j2], dtype=int)
        while a != b:
            if a < b:
                a, i2 = a * old[i2], i2 + 1
            else:
                b, j2 = b * new[j2], j2 + 1
        runs.append((i, i2, j, j2))
        i, j = i2, j2
    sizes = list(label.shape[:lead])
    for i, i2, j, j2 in runs:
        own = range(lead + i, lead + i2)
        if all(label.shape[axis] == 1 for axis in own):
            sizes += [1] * (j2 - j)
        else:
            for axis in own:
                label = full(label, axis, old[axis - lead])
            sizes += new[j:j2]
    return small(label.reshape(sizes))


# Back through primitives: for each operand that the result is linear in, how its label
# follows. What is linear for factors above zero alone, as a maximum is, counts: those
# of QK-Clip are.

_SAME = frozenset(
    [
        "convert_element_type",
        "copy",
        "copy_p",
        "reduce_precision",
        "neg",
        "real",
        "imag",
        "conj",
        "pvary",
        "pcast",
        "optimization_barrier",
        "mesh_cast",
        "reshard",
        "sharding_constraint",
        "abs",
        "pbroadcast",
        "layout_constraint",
        "stop_gradient",
        "device_put",
        "bitcast_convert_type",
        "ppermute",
        "sharding_barrier",
        "name",
        "psum",
        "psum_invariant",
        "psum2",
        "pmax",
        "pmin",
    ]
)
_SUMS = frozenset(
    ["add", "sub", "add_any", "max", "min", "select_n", "complex", "nextafter"]
)
_ALONG = frozenset(["cumsum", "cummax", "cummin", "reduce_window_sum", "fft"])
_REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])
_UPDATES = frozenset(["dynamic_update_slice", "scatter", "scatter-add", "scatter_add"])
#: Those whose result is no entry of theirs but made of one each.
ELEMENTWISE = frozenset(
    [
        "mul",
        "div",
        "log",
        "log1p",
        "exp",
        "exp2",
        "expm1",
        "logistic",
        "rsqrt",
        "sqrt",
        "cbrt",
        "pow",
        "integer_pow",
        "square",
        "erf",
        "erfc",
        "erf_inv",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
        "atan2",
        "asinh",
        "acosh",
        "atanh",
        "sign",
        "floor",
        "ceil",
        "round",
        "is_finite",
        "not",
        "and",
        "or",
        "xor",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "eq_to",
        "le_to",
        "lt_to",
        "rem",
        "clamp",
    ]
)

#: An index into an array, as a number, as the dimension of a loop whose trips it
#: counts, or `None` if it may be any.
IndexOf = Callable[[Any], Any]


def moves(eqn: Any, k: int, lead: int, index_of: IndexOf) -> list[tuple[int, Move]]:
    """How the label of an equation's `k`-th result goes back to its operands.

    Those of products among them: a product is linear in each of its two. None for what
    no rule is known of.
    """
    name, params = eqn.primitive.name, eqn.params
    out, ins = shape_of(eqn.outvars[k]), [shape_of(x) for x in eqn.invars]

    def through(to: Sequence[int | None]) -> Move:
        return lambda label: small(moved(label, lead, to))

    def fitted(i: int) -> Move:
        """For operands that are broadcast: numbers, and axes of one entry."""
        n = len(ins[i])
        if n != len(out):
            return through([None] * n)
        return through([d if ins[i][d] == out[d] else None for d in range(n)])

    if name in _SAME:
        i = k if len(ins) == len(eqn.outvars) else 0
        return [
            (i, through([*range(len(out))] if ins[i] == out else [None] * len(ins[i])))
        ]
    if name in _SUMS or name in ELEMENTWISE:
        first = 1 if name == "select_n" else 0
        return [(i, fitted(i)) for i in range(first, len(ins))]
    if name in ("reshape", "squeeze", "expand_dims"):
        return [(0, lambda label: reshaped(label, lead, out, ins[0]))]
    if name == "transpose":
        order = params["permutation"]
        return [(0, through([order.index(i) for i in range(len(out))]))]
    if name == "broadcast_in_dim":
        at = params["broadcast_dimensions"]
        dims = [d if ins[0][i] == out[d] else None for i, d in enumerate(at)]
        return [(0, through(dims))]
    if name in _REDUCTIONS:
        left = itertools.count()
        axes = params["axes"]
        dims = [None if i in axes else next(left) for i in range(len(ins[0]))]
        return [(0, through(dims))]
    if name in _ALONG:
        axes = [params["axis"]] if "axis" in params else range(len(out))
        gone = [lead + axis for axis in axes]
        if ins[0] != out:
            return [(0, through([None] * len(ins[0])))]
        return [(0, lambda label: joined(label, gone))]
    if name in PRODUCTS:
        if (to := sides(eqn)) is None:
            return []
        return [(i, through(dims)) for i, dims in enumerate(to)]
    rule = _PLACES.get(name)
    return rule(eqn, k, lead, index_of, out, ins) if rule else []


# Products: to which dimension of the result each of an operand's goes.

PRODUCTS = frozenset(
    ["dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"]
)


def sides(eqn: Any) -> list[list[int | None]] | None:
    """The dimension of the result that each of both operands becomes.

    `None` if summed over. The whole is `None` for what is no product of matrices, as
    the modes of ragged products that a gradient has.
    """
    if eqn.primitive.name == "conv_general_dilated":
        return _sides_of_conv(eqn)
    params, groups = eqn.params, ()
    if "ragged_dot_dimension_numbers" in params:
        numbers = params["ragged_dot_dimension_numbers"]
        groups = tuple(numbers.rhs_group_dimensions)
        if not groups:
            return None
        (ca, cb), (ba, bb) = numbers.dot_dimension_numbers
    else:
        (ca, cb), (ba, bb) = params["dimension_numbers"]
    ranks = [len(shape_of(x)) for x in eqn.invars[:2]]
    free_a = [i for i in range(ranks[0]) if i not in (*ca, *ba)]
    free_b = [i for i in range(ranks[1]) if i not in (*cb, *bb, *groups)]
    # Of the result, batch dimensions are first, then what is free on each side.
    orders = [*ba, *free_a], [*bb, *[None] * len(free_a), *free_b]
    return [
        [order.index(i) if i in order else None for i in range(rank)]
        for order, rank in zip(orders, ranks, strict=True)
    ]


def _sides_of_conv(eqn: Any) -> list[list[int | None]]:
    numbers = eqn.params["dimension_numbers"]
    image, kernel = ([None] * len(shape_of(x)) for x in eqn.invars)
    batch, feature, *_ = numbers.lhs_spec
    image[batch] = numbers.out_spec[0]
    kernel[numbers.rhs_spec[0]] = numbers.out_spec[1]
    features = (
        shape_of(eqn.invars[0])[feature],
        shape_of(eqn.outvars[0])[numbers.out_spec[1]],
    )
    # In groups as many as features, each goes its own way: Mamba's and ConvNeXt's.
    if eqn.params["feature_group_count"] > 1 and features[0] == features[1]:
        image[feature] = numbers.out_spec[1]
    return [image, kernel]


def contracted(eqn: Any) -> list[tuple[int, int]]:
    """The dimensions of both operands that a product sums over, in pairs."""
    if eqn.primitive.name != "dot_general":
        return []
    (a, b), _ = eqn.params["dimension_numbers"]
    return list(zip(a, b, strict=True))


# What takes entries from some places, or puts them there.


def _slice(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    starts, steps = eqn.params["start_indices"], eqn.params["strides"]
    steps = steps or (1,) * len(out)

    def move(label: Label) -> Label:
        for d, (start, step, n) in enumerate(zip(starts, steps, out, strict=True)):
            if ins[0][d] != n:
                at = slice(start, start + (n - 1) * step + 1, step)
                label = placed(label, lead + d, ins[0][d], at)
        return label

    return [(0, move)]


def _split(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    axis = eqn.params["axis"]
    sizes = eqn.params.get("sizes", (1,) * ins[0][axis])
    at = slice(sum(sizes[:k]), sum(sizes[: k + 1]))

    def move(label: Label) -> Label:
        if eqn.primitive.name == "unstack":  # the axis goes
            label = np.expand_dims(label, lead + axis)
        return placed(label, lead + axis, ins[0][axis], at)

    return [(0, move)]


def _concatenate(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    is_new = eqn.primitive.name == "stack"  # the dimension, from JAX 0.12 on
    dim = eqn.params["axis" if is_new else "dimension"]
    ends = list(itertools.accumulate((1 if is_new else x[dim] for x in ins), initial=0))

    def part(i: int) -> Move:
        def move(label: Label) -> Label:
            label = full(label, lead + dim, out[dim])
            label = label.take(range(ends[i], ends[i + 1]), lead + dim)
            return small(label.squeeze(lead + dim) if is_new else label)

        return move

    return [(i, part(i)) for i in range(len(ins))]


def _pad(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    config = eqn.params["padding_config"]

    def move(label: Label) -> Label:
        for d, (low, high, gap) in enumerate(config):
            axis = lead + d
            if low < 0 or high < 0 or gap:
                label = joined(label, [axis])
            elif low or high:
                label = full(label, axis, out[d])
                label = label.take(range(low, low + ins[0][d]), axis)
        return small(label)

    return [(0, move), (1, lambda label: moved(label, lead, []))]


def _rev(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    axes = [lead + d for d in eqn.params["dimensions"]]
    return [(0, lambda x: np.flip(x, [axis for axis in axes if x.shape[axis] > 1]))]


def _tile(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    apart = tuple(itertools.chain(*zip(eqn.params["reps"], ins[0], strict=True)))

    def move(label: Label) -> Label:
        label = reshaped(label, lead, out, apart)
        return small(moved(label, lead, range(1, len(apart), 2)))

    return [(0, move)]


def _dynamic_slice(
    eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any
):
    starts = eqn.invars[1:]
    return [
        (0, lambda x: picked(x, lead, dict(enumerate(starts)), index_of, out, ins[0]))
    ]


def picked(
    label: Label,
    lead: int,
    starts: dict[int, Any],
    index_of: IndexOf,
    out: Shape,
    of: Shape,
) -> Label:
    """The label of what entries were picked from, some along each dimension."""
    for d, start in starts.items():
        if out[d] == of[d]:
            continue
        at, axis = index_of(start), lead + d
        if isinstance(at, int):
            # XLA moves a slice that would end outside back inside.
            at = min(max(at, 0), of[d] - out[d])
            label = placed(label, axis, of[d], slice(at, at + out[d]))
        elif at is None or out[d] > 1:
            label = joined(label, [axis])  # any, and so all
        else:
            # The i-th trip of a loop has the i-th entry.
            trips, most = full(label, at.axis, at.size), min(at.size, of[d])
            rows = [trips.take([i], at.axis) for i in range(most)]
            rows = [placed(x, axis, of[d], slice(i, i + 1)) for i, x in enumerate(rows)]
            label = np.concatenate(rows, at.axis)
            label = placed(label, at.axis, at.size, slice(0, most))
    return label


def _update(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    i = 1 if eqn.primitive.name == "dynamic_update_slice" else 2
    new = ins[i]
    if len(new) != len(out):
        dims: list[int | None] = [None] * len(new)
    else:
        dims = [d if new[d] == out[d] else None for d in range(len(out))]
    return [
        (0, lambda label: label),
        (i, lambda label: small(moved(label, lead, dims))),
    ]


def _gather(eqn: Any, k: int, lead: int, index_of: IndexOf, out: Shape, ins: Any):
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(ins[0])) if d not in gone]
    to: list[int | None] = [None] * len(ins[0])
    for d, at in zip(kept, numbers.offset_dims, strict=True):
        to[d] = at
    rest = [d for d in range(len(out)) if d not in numbers.offset_dims]
    batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    for d, j in zip(*batch, strict=True):
        to[d] = rest[j]  # what both sides have in common, as `vmap` leaves it
    # By one index, not one for each token: a slice.
    is_picked = len(numbers.offset_dims) == len(out)
    starts = dict.fromkeys(numbers.start_index_map, eqn.invars[1])
    after = tuple(
        sizes[d] if d not in numbers.operand_batching_dims else n
        for d, n in enumerate(ins[0])
    )

    def move(label: Label) -> Label:
        label = moved(label, lead, to)
        is_one = len(starts) == 1 and (is_picked or index_of(eqn.invars[1]) is not None)
        if is_one:
            return small(picked(label, lead, starts, index_of, after, ins[0]))
        return small(joined(label, [lead + d for d in starts if after[d] != ins[0][d]]))

    return [(0, move)]


_PLACES: dict[str, Any] = {
    "slice": _slice,
    "split": _split,
    "unstack": _split,
    "concatenate": _concatenate,
    "stack": _concatenate,
    "pad": _pad,
    "rev": _rev,
    "tile": _tile,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    **dict.fromkeys(_UPDATES, _update),
}

#: Primitives that no parameter and no attention is lost sight of in.
KNOWN = (
    _SAME
    | _SUMS
    | _ALONG
    | _REDUCTIONS
    | _UPDATES
    | ELEMENTWISE
    | PRODUCTS
    | {*_PLACES}
) | frozenset(
    [
        "reshape",
        "squeeze",
        "expand_dims",
        "transpose",
        "broadcast_in_dim",
        "iota",
        "reduce_and",
        "reduce_or",
        "reduce_prod",
        "reduce_xor",
        "argmax",
        "argmin",
        "top_k",
        "approx_top_k",
        "sort",
        "all_to_all",
        "psum_scatter",
        "reduce_scatter",
        "all_gather",
        "all_gather_invariant",
        "axis_index",
        "lgamma",
        "digamma",
        "igamma",
        "igammac",
        "bessel_i0e",
        "bessel_i1e",
        "regularized_incomplete_beta",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
        "population_count",
        "cumlogsumexp",
        "cumprod",
        "random_bits",
        "random_seed",
        "random_wrap",
        "random_unwrap",
        "random_fold_in",
        "random_clone",
        "threefry2x32",
    ]
)

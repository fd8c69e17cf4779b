"""The table of primitives: all that the reading knows about each of them.

A row says what a primitive computes (its kind), along which axes it combines entries,
how marks go back through it, and how to compute it where its operands are known. All
passes of the reading ask the kind. To teach the reading a primitive, add its name to a
row, or add a row. The reading names a primitive without a row where it matters.
"""

import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from . import back, indexing, values
from .back import Moves, Op


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


class Kind(enum.Enum):
    """A kind of computation. Each pass of the reading treats a kind in one way.

    A kind says in which operands the result is linear, and a pass may look at the
    parameters that its primitives have: of a gather, of a product of two operands. If
    no kind fits, a primitive has no row, and the reading names it.
    """

    # Entries of one operand, or of several, as they are:
    SAME = "the same entries, possibly in another dtype, shape or place"
    REPEATED = "entries repeated along new dimensions"
    PERMUTED = "entries in another order, or from other devices"
    CUT = "entries from places that the equation names"
    PICKED = "entries from places that an operand names"
    JOINED = "entries of several operands side by side"
    PLACED = "entries of one operand at places in another"
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
    STEP = "a step function, whose slope is 0"
    BENT = "any other function, which is not linear"
    EQUAL = "whether two entries are equal"
    # Of many entries:
    CONTRACTION = "a product that sums over pairs of dimensions"
    TOTAL = "a sum along dimensions, whole or running"
    SCATTERED = "a sum of entries at places that an operand names"
    MIXED = "a linear function of all entries along dimensions"
    LOG_TOTAL = "the logarithm of a running sum of exponentials"
    FOLDED = "a product of all entries along dimensions"
    EXTREME = "a maximum or a minimum, whole or running, as one subtracts from logits"
    POOLED = "the maximum or the minimum of each window"
    ORDER = "entries in the order of their values, or their places"
    WINNER = "the place of a maximum or a minimum"
    EXCHANGED = "a sum over devices, or an exchange between them"
    ALGEBRA = "linear algebra, which may hide a parameter but hides no attention"
    # Of no entries:
    COUNTER = "0, 1, 2, ..."
    GENERATED = "random numbers, the number of a device, or a symbolic dimension"
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
_BENT |= {Kind.STEP, Kind.EQUAL, Kind.FOLDED, Kind.LOG_TOTAL}


#: A function from an equation's parameters and its operand's rank to dimensions.
AxesRule = Callable[[dict[str, Any], int], Iterable[int]]


def _none(params: dict[str, Any], rank: int) -> Iterable[int]:
    return ()


def _each(parameter: str) -> AxesRule:
    """Returns the axes that a parameter lists."""
    return lambda params, rank: params[parameter]


def _one(parameter: str) -> AxesRule:
    """Returns the axis that a parameter names."""
    return lambda params, rank: (params[parameter],)


def _last(params: dict[str, Any], rank: int) -> Iterable[int]:
    """Returns the axes of a Fourier transform, which are the last ones."""
    return range(rank - len(params["fft_lengths"]), rank)


def _windowed(params: dict[str, Any], rank: int) -> Iterable[int]:
    """Returns the axes along which windows have several entries."""
    return (d for d, n in enumerate(params["window_dimensions"]) if n > 1)


class Known(NamedTuple):
    """All that the reading knows of some primitives.

    - `names`: the primitives, by their `.name`, separated by spaces.
    - `kind`: what they compute.
    - `axes`: the dimensions of the first operand along which they combine entries.
    - `moves`: how marks go back from a result to the operands on which it depends.
    - `value`: how known operands make a known result, as of indices; `None` if the
        reading does not compute it.
    """

    names: str
    kind: Kind
    axes: AxesRule
    moves: back.MoveRule
    value: values.ValueRule | None


_ROWS = (
    Known(
        "convert_element_type copy copy_p reduce_precision pvary pcast mesh_cast "
        "reshard sharding_constraint sharding_barrier layout_constraint device_put "
        "pbroadcast name",
        Kind.SAME,
        _none,
        back.entrywise,
        values.same,
    ),
    Known(
        "reshape squeeze expand_dims", Kind.SAME, _none, back.reshape, values.reshape
    ),
    Known("broadcast_in_dim", Kind.REPEATED, _none, back.broadcast, values.broadcast),
    Known("tile", Kind.REPEATED, _none, back.tile, None),
    Known("transpose", Kind.PERMUTED, _none, back.transpose, values.transpose),
    Known("rev", Kind.PERMUTED, _none, back.rev, values.rev),
    # Several operands go through a barrier, each to a result of its own.
    Known("ppermute optimization_barrier", Kind.PERMUTED, _none, back.entrywise, None),
    Known("slice", Kind.CUT, _none, indexing.static_slice, values.static_slice),
    Known("split unstack", Kind.CUT, _none, indexing.split, None),
    Known(
        "dynamic_slice",
        Kind.PICKED,
        _none,
        indexing.dynamic_slice,
        values.dynamic_slice,
    ),
    Known("gather", Kind.PICKED, _none, indexing.gather, values.gather),
    Known(
        "concatenate stack",
        Kind.JOINED,
        _none,
        indexing.concatenate,
        values.concatenate,
    ),
    Known("pad", Kind.JOINED, _none, indexing.pad, None),
    Known("dynamic_update_slice", Kind.PLACED, _none, indexing.update_slice, None),
    Known("scatter", Kind.PLACED, _none, indexing.scatter, None),
    Known(
        "select_n",
        Kind.CHOICE,
        _none,
        back.select,
        values.of_entries(values.chosen),
    ),
    Known("stop_gradient", Kind.STOPPED, _none, back.entrywise, values.same),
    Known("neg", Kind.LINEAR, _none, back.entrywise, values.of_entries(np.negative)),
    Known(
        "real imag conj complex nextafter bitcast_convert_type",
        Kind.LINEAR,
        _none,
        back.entrywise,
        None,
    ),
    Known("abs", Kind.LINEAR, _none, back.entrywise, values.of_entries(np.abs)),
    Known("add add_any", Kind.SUM, _none, back.entrywise, values.of_entries(np.add)),
    Known(
        "sub", Kind.DIFFERENCE, _none, back.entrywise, values.of_entries(np.subtract)
    ),
    Known("max", Kind.LARGER, _none, back.entrywise, values.of_entries(np.maximum)),
    Known("min", Kind.LARGER, _none, back.entrywise, values.of_entries(np.minimum)),
    Known("mul", Kind.PRODUCT, _none, back.entrywise, values.of_entries(np.multiply)),
    Known("div", Kind.QUOTIENT, _none, back.entrywise, values.divided),
    Known("exp exp2 pow", Kind.EXPONENTIAL, _none, back.entrywise, None),
    Known("log log1p", Kind.LOGARITHM, _none, back.entrywise, None),
    Known("integer_pow", Kind.POWER, _none, back.entrywise, None),
    Known("tanh", Kind.SOFTCAP, _none, back.entrywise, None),
    Known("ceil round", Kind.STEP, _none, back.entrywise, None),
    Known("rem", Kind.BENT, _none, back.entrywise, values.rest),
    Known("sign", Kind.STEP, _none, back.entrywise, values.of_entries(np.sign)),
    Known("floor", Kind.STEP, _none, back.entrywise, values.of_entries(np.floor)),
    Known("ne", Kind.BENT, _none, back.entrywise, values.of_entries(np.not_equal)),
    Known("lt", Kind.BENT, _none, back.entrywise, values.of_entries(np.less)),
    Known("le", Kind.BENT, _none, back.entrywise, values.of_entries(np.less_equal)),
    Known("gt", Kind.BENT, _none, back.entrywise, values.of_entries(np.greater)),
    Known("ge", Kind.BENT, _none, back.entrywise, values.of_entries(np.greater_equal)),
    Known("and", Kind.BENT, _none, back.entrywise, values.of_entries(np.bitwise_and)),
    Known("or", Kind.BENT, _none, back.entrywise, values.of_entries(np.bitwise_or)),
    Known("xor", Kind.BENT, _none, back.entrywise, values.of_entries(np.bitwise_xor)),
    Known("not", Kind.BENT, _none, back.entrywise, values.of_entries(np.invert)),
    Known("clamp", Kind.BENT, _none, back.entrywise, values.of_entries(values.clamped)),
    Known(
        "square sqrt rsqrt cbrt expm1 logistic is_finite "
        "erf erfc erf_inv sin cos tan sinh cosh asin acos atan atan2 asinh acosh atanh "
        "lgamma digamma polygamma zeta igamma igammac bessel_i0e bessel_i1e polynomial "
        "regularized_incomplete_beta eq_to le_to lt_to "
        "shift_left shift_right_logical shift_right_arithmetic population_count",
        Kind.BENT,
        _none,
        back.entrywise,
        None,
    ),
    Known("eq", Kind.EQUAL, _none, back.entrywise, values.of_entries(np.equal)),
    Known(
        "dot_general ragged_dot_general ragged_dot",
        Kind.CONTRACTION,
        _none,
        back.product,
        None,
    ),
    Known("conv_general_dilated", Kind.CONTRACTION, _none, back.convolution, None),
    Known("reduce_sum", Kind.TOTAL, _each("axes"), back.reduce, None),
    Known("cumsum", Kind.TOTAL, _one("axis"), back.mixing, None),
    Known("reduce_window_sum", Kind.TOTAL, _windowed, back.windows, None),
    Known("scatter-add scatter_add", Kind.SCATTERED, _none, indexing.scatter, None),
    Known("fft", Kind.MIXED, _last, back.mixing, None),
    Known("reduce_prod reduce_xor", Kind.FOLDED, _each("axes"), back.reduce, None),
    # The derivative of the maximum of windows. It is linear in its first operand; the
    # second one only says which entry of a window to take.
    Known("select_and_gather_add", Kind.MIXED, _windowed, back.windows, None),
    # Linear in the operand, but not in the updates, which are no summands: read as a
    # sum, both factors would be scaled by QK-Clip, and their product twice.
    Known("scatter-mul", Kind.FOLDED, _none, indexing.scatter, None),
    Known("cumprod", Kind.FOLDED, _one("axis"), back.mixing, None),
    Known("cumlogsumexp", Kind.LOG_TOTAL, _one("axis"), back.mixing, None),
    Known("reduce_max reduce_min", Kind.EXTREME, _each("axes"), back.reduce, None),
    Known("reduce_and reduce_or", Kind.EXTREME, _each("axes"), back.reduce, None),
    Known("cummax cummin", Kind.EXTREME, _one("axis"), back.mixing, None),
    Known(
        "reduce_window_max reduce_window_min",
        Kind.POOLED,
        _windowed,
        back.windows,
        None,
    ),
    Known("scatter-max scatter-min", Kind.EXTREME, _none, indexing.scatter, None),
    Known("pmax pmin", Kind.EXTREME, _none, back.over_devices, None),
    Known("sort", Kind.ORDER, _one("dimension"), back.mixing, None),
    Known("top_k", Kind.ORDER, _one("axis"), back.mixing, None),
    Known("approx_top_k", Kind.ORDER, _one("reduction_dimension"), back.mixing, None),
    Known("argmax argmin", Kind.WINNER, _each("axes"), back.nowhere, None),
    Known("psum psum_invariant psum2", Kind.EXCHANGED, _none, back.over_devices, None),
    Known(
        "all_gather all_gather_invariant", Kind.EXCHANGED, _none, back.all_gather, None
    ),
    Known(
        "psum_scatter reduce_scatter", Kind.EXCHANGED, _none, back.reduce_scatter, None
    ),
    Known("all_to_all", Kind.EXCHANGED, _none, back.all_to_all, None),
    Known(
        "triangular_solve cholesky lu lu_pivots_to_permutation qr householder_product "
        "eigh eig svd schur tridiagonal tridiagonal_solve custom_linear_solve geqrf "
        "ormqr geqp3 hessenberg cholesky_update",
        Kind.ALGEBRA,
        _none,
        back.nowhere,
        None,
    ),
    Known("iota", Kind.COUNTER, _none, back.nowhere, values.iota),
    Known(
        "random_bits random_seed random_wrap random_unwrap random_fold_in random_clone "
        "random_split rng_bit_generator threefry2x32 axis_index dim_as_value",
        Kind.GENERATED,
        _none,
        back.nowhere,
        None,
    ),
)

#: The row of each primitive, by its name.
TABLE = {name: row for row in _ROWS for name in row.names.split()}


def kind_of(name: str) -> Kind:
    """Returns what a primitive computes, by its name."""
    return TABLE[name].kind if name in TABLE else Kind.UNKNOWN

"""Numbers that are known when a function is traced, as many indices are.

The value of a variable is an array with the axes of its marks: first one for each loop
and mesh axis around it, then its own. An axis along which all entries are equal has one
entry. A loop's counter thus has a value for each trip.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from . import jaxprs
from .jaxprs import Address
from .marks import full, reshaped, small


class Lead(NamedTuple):
    """A dimension in front of marks: trips of a loop, or devices along a mesh axis."""

    axis: int  # its place in the lead
    of: Address | str  # the address of the loop, or the name of the mesh axis
    size: int

    @property
    def is_loop(self) -> bool:
        return not isinstance(self.of, str)


#: Known entries of a variable, or `None`.
Value = np.ndarray | None

# The most entries of a value, and the most trips of a loop that are computed one by
# one. Indices of layers have fewer; masks and positions are not needed.
_MOST = 1 << 14
_MOST_TRIPS = 1 << 9


def number_in(value: Value) -> int | float | None:
    """Returns the number that all entries of a variable have, if they are known."""
    return value.item() if value is not None and value.size == 1 else None


class Numbers:
    """Finds the values of variables, in all trips of the loops around them."""

    def __init__(self):
        self._known: dict[Any, Value] = {}

    def of(self, atom: Any) -> Value:
        """Returns the value of a variable."""
        if atom not in self._known:
            value = self._find(atom)
            if value is not None:
                value = small(value) if value.size <= _MOST else None
            self._known[atom] = value
        return self._known[atom]

    def _find(self, atom: Any) -> Value:
        frame, var = atom.frame, atom.var
        if isinstance(var, Literal) or var in frame.consts:
            found = var.val if isinstance(var, Literal) else frame.consts[var]
            return _constant(found, atom.lead)
        if var in frame.place:
            return self._input(atom) if frame.caller else None
        eqn, k = frame.made[var]
        if eqn.inside:
            (one, *others) = eqn.inside
            is_call = one.kind == "call" and not others and k < len(one.outputs)
            return self.of(one.outputs[k]) if is_call else None
        if eqn.name not in _ON_NUMBERS or k:
            return None
        values: list[np.ndarray] = []
        for x in eqn.inputs():
            if (value := self.of(x)) is None:
                return None
            # A number is broadcast to any array.
            ones = [1] * (0 if x.shape else len(atom.shape))
            values.append(value.reshape((*value.shape, *ones)))
        with np.errstate(all="ignore"):
            return _as(atom.var.aval.dtype, _ON_NUMBERS[eqn.name](eqn, values))

    def _input(self, atom: Any) -> Value:
        frame = atom.frame
        outer, how = frame.outer[frame.place[atom.var]]
        if how == "carry":
            return self._carried(atom, outer)
        value = self.of(outer)
        # The trips of a slice are the first dimension of the array that it slices.
        if value is None or how == "slice":
            return value
        if frame.kind == "loop":
            return np.expand_dims(value, outer.lead)
        if frame.kind == "mesh" or atom.shape != outer.shape:
            # A device may have another part of an array than its neighbor.
            if any(n > 1 for n in value.shape[outer.lead :]):
                return None
            ones = [1] * (atom.rank - outer.lead)
            return value.reshape((*value.shape[: outer.lead], *ones))
        return value

    def _carried(self, atom: Any, start: Any) -> Value:
        """Returns an integer that goes from trip to trip, such as a loop's counter."""
        frame, axis, count = atom.frame, start.lead, atom.frame.lead[-1].size
        is_index = not jnp.issubdtype(atom.var.aval.dtype, jnp.inexact)
        if not is_index or atom.shape or (first := self.of(start)) is None:
            return None
        k = frame.carried.index(frame.place[atom.var])
        loop: Any = jaxprs.loop(frame.caller.jaxpr_eqn)
        step = jaxprs.step_of(frame.jaxpr, atom.var, frame.outputs[k].var)
        if step is not None:
            steps = step * np.arange(count).reshape([-1] + [1] * (atom.rank - axis - 1))
            values = np.expand_dims(first, axis) + steps
            values = np.flip(values, axis) if loop.is_reversed else values
            return _as(atom.var.aval.dtype, values)
        if count > _MOST_TRIPS:
            return None
        rows, trip = [np.expand_dims(first, axis)], None
        for t in range(count - 1):
            trip = _Trip(frame, count - 1 - t if loop.is_reversed else t, self, trip)
            if (row := trip.of(frame.outputs[k])) is None:
                return None
            rows.append(row)
        rows = np.broadcast_arrays(*rows[:: -1 if loop.is_reversed else 1])
        return np.concatenate(rows, axis)


class _Trip(Numbers):
    """Finds the values that variables inside of a loop have in one of its trips.

    `outer` knows the values outside of the loop, and `before` those of the trip before.
    """

    def __init__(self, frame: Any, i: int, outer: Numbers, before: "_Trip | None"):
        super().__init__()
        self._frame, self._i, self._outer, self._before = frame, i, outer, before

    def of(self, atom: Any) -> Value:
        is_inside = atom.lead >= len(self._frame.lead)
        return super().of(atom) if is_inside else self._outer.of(atom)

    def _input(self, atom: Any) -> Value:
        frame = self._frame
        if atom.frame is not frame:
            return super()._input(atom)
        i, axis = frame.place[atom.var], len(frame.lead) - 1
        outer, how = frame.outer[i]
        if how == "carry" and self._before is not None:
            return self._before.of(frame.outputs[frame.carried.index(i)])
        value = self.of(outer)
        if value is None or how != "slice":
            return None if value is None else np.expand_dims(value, axis)
        return value.take([self._i], axis) if value.shape[axis] > 1 else value


def _constant(value: Any, lead: int) -> Value:
    if getattr(value, "size", 1) > _MOST:
        return None
    try:
        found = np.asarray(value)
    except Exception:  # a key, or a tracer of another trace
        return None
    found = _as(found.dtype, found)
    return None if found is None else found.reshape((*[1] * lead, *found.shape))


def _as(dtype: Any, value: Value) -> Value:
    """Returns a value with the range of its type, but floats in full precision."""
    if value is None:
        return None
    if dtype == jnp.bool_:
        return value.astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        return value.astype(dtype).astype(np.int64)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return value.astype(np.float64) if is_float else None


# The functions below get the equation and the values of its operands. They return
# `None` for values that they do not know, or that are too large.

_Rule = Callable[[Any, list[np.ndarray]], Value]


def _entrywise(function: Callable[..., Any]) -> _Rule:
    def rule(eqn: Any, values: list[np.ndarray]) -> Value:
        shape = np.broadcast_shapes(*(x.shape for x in values))
        return np.asarray(function(*values)) if math.prod(shape) <= _MOST else None

    return rule


def _divided(eqn: Any, values: list[np.ndarray]) -> Value:
    a, b = values
    is_float = any(x.dtype.kind == "f" for x in values)
    # Integers are rounded toward zero.
    found = _entrywise(np.divide if is_float else lambda a, b: (a - np.fmod(a, b)) // b)
    return found(eqn, [a, b]) if b.all() else None


def _rest(eqn: Any, values: list[np.ndarray]) -> Value:
    return _entrywise(np.fmod)(eqn, values) if values[1].all() else None


def _reshape(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, (x,) = len(eqn.frame.lead), values
    old, new = eqn.inputs()[0].shape, eqn.output().shape
    if math.prod(x.shape[lead:]) > 1 and math.prod((*x.shape[:lead], *old)) > _MOST:
        return None
    return reshaped(x, lead, old, new)


def _broadcast(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, (x, *_) = len(eqn.frame.lead), values
    shape = [*x.shape[:lead], *[1] * len(eqn.output().shape)]
    for d, at in enumerate(eqn.jaxpr_eqn.params["broadcast_dimensions"]):
        shape[lead + at] = x.shape[lead + d]
    return x.reshape(shape)


def _transpose(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, order = len(eqn.frame.lead), eqn.jaxpr_eqn.params["permutation"]
    return values[0].transpose([*range(lead), *(lead + d for d in order)])


def _rev(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, dims = len(eqn.frame.lead), eqn.jaxpr_eqn.params["dimensions"]
    return np.flip(values[0], tuple(lead + d for d in dims))


def _iota(eqn: Any, values: list[np.ndarray]) -> Value:
    d, atom = eqn.jaxpr_eqn.params["dimension"], eqn.output()
    shape = [1] * atom.rank
    shape[atom.lead + d] = -1
    return np.arange(atom.shape[d]).reshape(shape) if atom.shape[d] <= _MOST else None


def _slice(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, params, (x,) = len(eqn.frame.lead), eqn.jaxpr_eqn.params, values
    steps = params["strides"] or [1] * len(params["start_indices"])
    places = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    cut = [slice(*place) for place in places]
    sizes = zip(cut, x.shape[lead:], strict=True)
    return x[
        (*[slice(None)] * lead, *(at if n > 1 else slice(None) for at, n in sizes))
    ]


def _concatenate(eqn: Any, values: list[np.ndarray]) -> Value:
    is_new = eqn.name == "stack"  # the dimension, from JAX 0.12 on
    d = eqn.jaxpr_eqn.params["axis" if is_new else "dimension"]
    axis = len(eqn.frame.lead) + d
    if is_new:
        values = [np.expand_dims(x, axis) for x in values]
    sizes = [1 if is_new else x.shape[d] for x in eqn.inputs()]
    values = [full(x, axis, n) for x, n in zip(values, sizes, strict=True)]
    rest = ((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in values)
    shape = list(np.broadcast_shapes(*rest))
    if math.prod(shape) * sum(sizes) > _MOST:
        return None
    own = [[*shape[:axis], n, *shape[axis + 1 :]] for n in sizes]
    return np.concatenate(list(map(np.broadcast_to, values, own)), axis)


def _dynamic_slice(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, (x, *starts) = len(eqn.frame.lead), values
    of, sizes = eqn.inputs()[0].shape, eqn.output().shape
    for d, (n, start) in enumerate(zip(sizes, starts, strict=True)):
        if x is not None and n < of[d]:
            start = np.clip(start.reshape(start.shape[:lead]), 0, of[d] - n)
            at = start[..., None] + np.arange(n)
            taken = _taken(np.moveaxis(full(x, lead + d, of[d]), lead + d, lead), at)
            x = taken if taken is None else np.moveaxis(taken, lead, lead + d)
    return x


def _gather(eqn: Any, values: list[np.ndarray]) -> Value:
    """Returns the rows of an array that indices pick along one axis."""
    lead, (x, at), params = len(eqn.frame.lead), values, eqn.jaxpr_eqn.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    of, rank = eqn.inputs()[0].shape, len(eqn.output().shape)
    own = numbers.start_index_map
    kept = [n for d, n in enumerate(of) if d not in own]
    is_row = numbers.collapsed_slice_dims == own and len(own) == 1
    is_row &= numbers.offset_dims == tuple(range(rank - len(kept), rank))
    if not is_row or [*sizes] != [1 if d in own else n for d, n in enumerate(of)]:
        return None
    axis = lead + own[0]
    rows = np.moveaxis(full(x, axis, of[own[0]]), axis, lead)
    return _taken(rows, np.clip(at[..., 0], 0, of[own[0]] - 1), lead)


def _taken(rows: np.ndarray, at: np.ndarray, lead: int | None = None) -> Value:
    """Returns the rows, along the first axis after the lead, at some places."""
    lead = at.ndim - 1 if lead is None else lead
    rest = rows.shape[lead + 1 :]
    own = np.broadcast_shapes(rows.shape[:lead], at.shape[:lead])
    count = math.prod(at.shape[lead:])
    if math.prod(own) * math.prod(rest) * max(count, rows.shape[lead]) > _MOST:
        return None
    flat = at.reshape((*at.shape[:lead], count, *[1] * len(rest)))
    flat = np.broadcast_to(flat, (*own, count, *rest))
    rows = np.broadcast_to(rows, (*own, *rows.shape[lead:]))
    taken = np.take_along_axis(rows, flat, lead)
    return taken.reshape((*own, *at.shape[lead:], *rest))


def _chosen(which: Any, *cases: Any) -> Any:
    return np.choose(which.astype(int), np.broadcast_arrays(*cases))


_ON_NUMBERS: dict[str, _Rule] = {
    "add": _entrywise(np.add),
    "sub": _entrywise(np.subtract),
    "mul": _entrywise(np.multiply),
    "div": _divided,
    "rem": _rest,
    "neg": _entrywise(np.negative),
    "sign": _entrywise(np.sign),
    "abs": _entrywise(np.abs),
    "floor": _entrywise(np.floor),
    "max": _entrywise(np.maximum),
    "min": _entrywise(np.minimum),
    "eq": _entrywise(np.equal),
    "ne": _entrywise(np.not_equal),
    "lt": _entrywise(np.less),
    "le": _entrywise(np.less_equal),
    "gt": _entrywise(np.greater),
    "ge": _entrywise(np.greater_equal),
    "and": _entrywise(np.bitwise_and),
    "or": _entrywise(np.bitwise_or),
    "xor": _entrywise(np.bitwise_xor),
    "not": _entrywise(np.invert),
    "select_n": _entrywise(_chosen),
    "clamp": _entrywise(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(["reshape", "squeeze", "expand_dims"], _reshape),
    "transpose": _transpose,
    "rev": _rev,
    "iota": _iota,
    "slice": _slice,
    **dict.fromkeys(["concatenate", "stack"], _concatenate),
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    **dict.fromkeys(
        ["convert_element_type", "copy", "copy_p", "stop_gradient", "pvary", "pcast"],
        lambda eqn, values: values[0],
    ),
}

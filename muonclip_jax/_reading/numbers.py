"""Numbers that are known when a function is traced, as many indices are.

The value of a variable is an array with the axes of its marks: first one for each loop
and mesh axis around it, then its own. An axis along which all entries are equal has one
entry. A loop's counter thus has a value for each trip.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from . import jaxprs
from .jaxprs import Address
from .marks import small
from .primitives import TABLE
from .values import MOST, Value


class Lead(NamedTuple):
    """A dimension in front of marks: trips of a loop, or devices along a mesh axis."""

    axis: int  # its place in the lead
    name: Address | str  # the address of the loop, or the name of the mesh axis
    size: int

    @property
    def is_loop(self) -> bool:
        return not isinstance(self.name, str)


# The most trips of a loop that are computed one by one.
_MOST_TRIPS = 1 << 9


def number_in(value: Value) -> int | float | None:
    """Returns the number that all entries of a variable have, if they are known."""
    return value.item() if value is not None and value.size == 1 else None


class Numbers:
    """Finds the values of variables, in all trips of the loops around them."""

    def __init__(self):
        self._values: dict[Any, Value] = {}

    def of(self, atom: Any) -> Value:
        """Returns the value of a variable."""
        if atom not in self._values:
            value = self._find(atom)
            if value is not None:
                value = small(value) if value.size <= MOST else None
            self._values[atom] = value
        return self._values[atom]

    def _find(self, atom: Any) -> Value:
        frame, var = atom.frame, atom.var
        if isinstance(var, Literal) or var in frame.consts:
            constant = var.val if isinstance(var, Literal) else frame.consts[var]
            return _constant(constant, atom.lead)
        if var in frame.position:
            return self._input(atom) if frame.caller else None
        eqn, k = frame.definitions[var]
        if eqn.inside:
            (inner, *others) = eqn.inside
            is_call = inner.kind == "call" and not others and k < len(inner.outputs)
            return self.of(inner.outputs[k]) if is_call else None
        rule = TABLE[eqn.name].value if eqn.name in TABLE else None
        if rule is None or k:
            return None
        values: list[np.ndarray] = []
        for x in eqn.inputs():
            if (value := self.of(x)) is None:
                return None
            # A number is broadcast to any array.
            ones = [1] * (0 if x.shape else len(atom.shape))
            values.append(value.reshape((*value.shape, *ones)))
        with np.errstate(all="ignore"):
            return _as(atom.var.aval.dtype, rule(eqn, values))

    def _input(self, atom: Any) -> Value:
        frame = atom.frame
        outer, how = frame.outer[frame.position[atom.var]]
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
        k = frame.carried.index(frame.position[atom.var])
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
        i, axis = frame.position[atom.var], len(frame.lead) - 1
        outer, how = frame.outer[i]
        if how == "carry" and self._before is not None:
            return self._before.of(frame.outputs[frame.carried.index(i)])
        value = self.of(outer)
        if value is None or how != "slice":
            return None if value is None else np.expand_dims(value, axis)
        return value.take([self._i], axis) if value.shape[axis] > 1 else value


def _constant(value: Any, lead: int) -> Value:
    if getattr(value, "size", 1) > MOST:
        return None
    try:
        array = np.asarray(value)
    except Exception:  # a key, or a tracer of another trace
        return None
    array = _as(array.dtype, array)
    return None if array is None else array.reshape((*[1] * lead, *array.shape))


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

"""Numbers that are known when a function is traced, as many indices are.

A loop's counter is known to be the number of the trip, though not its value.
"""

from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from . import jaxprs
from .jaxprs import Address
from .primitives import Kind, TABLE


class Lead(NamedTuple):
    """A dimension in front of marks: trips of a loop, or devices along a mesh axis."""

    axis: int  # its place in the lead
    of: Address | str  # the address of the loop, or the name of the mesh axis
    size: int

    @property
    def is_loop(self) -> bool:
        return not isinstance(self.of, str)


#: A number, the trips of a loop that counts from zero, or `None` if not known.
Number = int | float | Lead | None

#: Kinds of primitives that leave a number as it is.
_AS_IT_IS = (Kind.SAME, Kind.REPEATED)


def number_of(atom: Any) -> Number:
    """Returns the value of all entries of a variable."""
    frame, var = atom.frame, atom.var
    if isinstance(var, Literal) or var in frame.consts:
        value = var.val if isinstance(var, Literal) else frame.consts[var]
        try:
            value = value.item() if hasattr(value, "item") else value
        except Exception:  # an array, a key, or a tracer of another trace
            return None
        return value if isinstance(value, int | float) else None
    if var in frame.place:
        return _of_input(atom)
    eqn, k = frame.made[var]
    if eqn.kind in _AS_IT_IS:
        return number_of(eqn.inputs()[0])
    if eqn.inside:
        (one, *others) = eqn.inside
        return number_of(one.outputs[k]) if one.kind == "call" and not others else None
    function = TABLE[eqn.name].number if eqn.name in TABLE else None
    if function is None:
        return None
    values = [number_of(x) for x in eqn.inputs()]
    if eqn.kind in (Kind.CHOICE, Kind.LARGER) or eqn.name == "clamp":
        # JAX turns an index into `where(i < 0, i + n, i)` before it uses it.
        for value in values:
            if isinstance(value, Lead):
                return value
    if any(not isinstance(x, int | float) for x in values):
        return None
    return function(*values)


def _of_input(atom: Any) -> Number:
    frame, i = atom.frame, atom.frame.place[atom.var]
    if frame.caller is None:
        return None
    outer, how = frame.outer[i]
    if how == "same":
        return number_of(outer)
    if atom.shape:
        return None
    trips = frame.lead[-1]
    if how == "carry":
        # `fori_loop` counts from zero.
        after = frame.jaxpr.outvars[frame.carried.index(i)]
        counts = jaxprs.adds_one(frame.jaxpr, atom.var, after)
        return trips if counts and number_of(outer) == 0 else None
    # `scan(f, x, arange(n))` does, too.
    return trips if _counts(outer, trips.size) else None


def _counts(atom: Any, size: int) -> bool:
    """Whether an array is 0, 1, 2, ..."""
    frame, var = atom.frame, atom.var
    if isinstance(var, Literal):
        return False
    if var in frame.consts:
        return np.array_equal(np.asarray(frame.consts[var]), np.arange(size))
    eqn, _ = frame.made.get(var, (None, 0))
    if eqn is None or eqn.kind not in (Kind.COUNTER, *_AS_IT_IS):
        return False
    return eqn.kind is Kind.COUNTER or _counts(eqn.inputs()[0], size)

"""Checks of numbers, flags, dtypes and choices, in the words of the user.

A number may be traced, as under `optax.inject_hyperparams`: then its type alone is
known, and checked. Messages name the argument, what it may be and what was given.
"""

import math
import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


class Range(NamedTuple):
    """A range of numbers, and the words for it after "must"."""

    must: str
    holds: Callable[[Any], Any]  # elementwise, False for NaN


FINITE = Range("be finite", np.isfinite)
POSITIVE = Range("be positive", lambda x: x > 0)
NOT_NEGATIVE = Range("be finite and not negative", lambda x: (x >= 0) & (x < math.inf))
SHARE = Range("be in [0, 1]", lambda x: (x >= 0) & (x <= 1))
BELOW_ONE = Range("be in [0, 1)", lambda x: (x >= 0) & (x < 1))


class HasDType(Protocol):
    """A scalar type of JAX, such as `jnp.bfloat16`."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


#: A dtype of `FLOATS`, as a type checker knows its names.
FloatDType = (
    Literal["float16", "bfloat16", "float32", "float64"]
    | np.dtype[Any]
    | type[Any]
    | HasDType
)

# Not those of 8 bits, which are formats to store and to multiply, not to add in.
FLOATS = ("float16", "bfloat16", "float32", "float64")


def check_number(name: str, value: Any, within: Range | None, *others: str) -> Any:
    """The value; `ValueError` for no real number, and for one out of range.

    `others` are further kinds that it may be: "an array", "a schedule", whose results
    are checked in turn, "None". Without a range the value is not read, so that no step
    waits for a device.
    """
    if value is None and "None" in others:
        return None
    if callable(value) and "a schedule" in others:
        also = [x for x in others if x == "an array"]
        of = f"the value of the schedule {name}"
        return lambda step: check_number(of, value(step), None, *also)
    kinds = " or ".join(("a number", *others))
    # Schedules are the likely mistake where optax has them for some arguments only.
    if callable(value):
        remedy = (
            f"it takes no schedule: use optax.inject_hyperparams(...)(..., {name}="
            "schedule)"
            if name.isidentifier()
            else "call what makes the schedule"
        )
        raise ValueError(f"{name} must be {kinds}, got {shown(value)}; {remedy}")
    # By type: a bool is an int to Python, and a string of digits converts, but neither
    # was meant as a number.
    dtype = getattr(value, "dtype", type(value))
    is_number = hasattr(value, "dtype") or dtype in (int, float)
    if not is_number or not any(
        jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer)
    ):
        raise ValueError(f"{name} must be {kinds}, got {shown(value)}")
    if np.ndim(value) and "an array" not in others:
        raise ValueError(f"{name} must be one number, got shape {np.shape(value)}")
    if within is not None and not isinstance(value, Tracer):
        # On the host: jnp would run a program, under `jit` a part of the caller's.
        known = np.asarray(value, np.float64)
        if not np.all(within.holds(known)):
            raise ValueError(f"{name} must {within.must}, got {value}")
    return value


def check_first(name: str, first: Any, within: Range) -> None:
    """Raises where a schedule is out of range in its first step.

    A warm-up often begins at 0. Traced, there is no value to look at yet.
    """
    if not isinstance(first, Tracer) and not np.all(within.holds(np.asarray(first))):
        raise ValueError(
            f"{name} must {within.must}, but its schedule begins at {np.min(first):g}"
        )


def check_whole_number(name: str, value: Any, least: int | None = None) -> int:
    """The value as an integer; `ValueError` for no integer, one too small or traced."""
    kind = "a whole number" if least is None else f"a whole number from {least} on"
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError  # though it has an index
        # NumPy's integers and scalars of JAX have one, floats such as 5.0 have none.
        number = operator.index(value)
    except TypeError:
        known = ", known when tracing" if isinstance(value, Tracer) else ""
        raise ValueError(f"{name} must be {kind}{known}, got {shown(value)}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """The value as a bool; `ValueError` for what is none."""
    # By type: an argument in the wrong place, or the string "False", has a truth value.
    if isinstance(value, bool | np.bool_):
        return bool(value)
    known = ", known when tracing" if isinstance(value, Tracer) else ""
    raise ValueError(f"{name} must be True or False{known}, got {shown(value)}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"unknown {name} {shown(value)}; choose one of {known}")


def check_float_dtype(name: str, value: Any, also: str | None = None) -> Any:
    """The value as a dtype of 16 bits or more, or `also`; `None` stays."""
    if value is None:
        return None
    if hasattr(value, "shape") and not isinstance(value, np.dtype):
        raise ValueError(
            f"{name} must be a dtype, got {shown(value)}. optax.inject_hyperparams "
            f"calls a type as a schedule, unless it is given static_args=({name!r},)"
        )
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.name not in (*FLOATS, also):
        known = " or ".join(filter(None, (", ".join(FLOATS), also, "None")))
        raise ValueError(
            f"{name} must be a float dtype, one of {known}; got {shown(value)}"
        )
    return dtype


def is_float(dtype: Any) -> bool:
    """True for a real or complex float of 16 bits or more."""
    # The `finfo` of a complex dtype is that of its parts.
    return jnp.issubdtype(dtype, np.inexact) and jnp.finfo(dtype).dtype.name in FLOATS


def check_array(name: str, value: Any, *, real: bool = False) -> jax.Array:
    """The value as an array of numbers or bools; `ValueError` for what is none."""
    try:
        x = jnp.asarray(value)
    except (TypeError, ValueError):
        x = None
    if x is None or not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise ValueError(f"{name} must be an array, got {shown(value)}")
    if real and jnp.iscomplexobj(x):
        raise ValueError(f"{name} must be real, got {shown(value)}")
    return x


def check_function_or_none(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {shown(value)}")


def check_transformation(name: str, value: Any) -> None:
    if not all(callable(getattr(value, part, None)) for part in ("init", "update")):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation, such as "
            f"mc.muonclip(1e-3), got {shown(value)}"
        )


def check_state(name: str, is_own: bool) -> None:
    """Raises for a state of another set-up, and for arguments in another order."""
    if not is_own:
        raise ValueError(
            f"the state is not one that init of {name} made: call tx.update(grads, "
            "state, params) with the state that the last update returned, or with a "
            "checkpoint of the same optimizer, restored into tx.init(params)"
        )


def shown(value: Any) -> str:
    """The value as messages write it, in short."""
    # The repr of an array is lines of numbers, that of a tracer names JAX's internals.
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} {tuple(value.shape)}"
    if callable(value):
        return f"the function {getattr(value, '__qualname__', repr(value))}"
    return reprlib.repr(value)

"""Checks of numbers, flags, dtypes and choices, in the words of the user.

A number may be traced, as under `optax.inject_hyperparams`. Then only its type is known
yet, and all that is checked.
"""

import math
import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


class Range(NamedTuple):
    """A range of numbers, and what a number in it "must"."""

    must: str
    holds: Callable[[Any], Any]


FINITE = Range("be finite", np.isfinite)
POSITIVE = Range("be positive", lambda x: x > 0)
NOT_NEGATIVE = Range("be finite and not negative", lambda x: (x >= 0) & (x < math.inf))
SHARE = Range("lie in [0, 1]", lambda x: (x >= 0) & (x <= 1))
BELOW_ONE = Range("lie in [0, 1)", lambda x: (x >= 0) & (x < 1))

FLOATS = ("float16", "bfloat16", "float32", "float64")


def number(name: str, value: Any, within: Range, *others: str) -> None:
    """Raises `ValueError` for what is no real number, and for one out of range.

    `others` are what it may be besides: "an array", "a schedule", "None".
    """
    if (value is None and "None" in others) or (
        callable(value) and "a schedule" in others
    ):
        return
    kinds = " or ".join(("a number", *others))
    if callable(value):
        raise ValueError(
            f"{name} must be {kinds}, got {shown(value)}; it takes no schedule, but "
            f"changes by optax.inject_hyperparams(...)(..., {name}=schedule)"
        )
    if not _is_real(value):
        raise ValueError(f"{name} must be {kinds}, got {shown(value)}")
    if np.ndim(value) and "an array" not in others:
        raise ValueError(f"{name} must be one number, got shape {np.shape(value)}")
    if not isinstance(value, Tracer):
        known = np.asarray(value, np.float64)
        if not np.all(within.holds(known)):
            raise ValueError(f"{name} must {within.must}, got {value}")


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """As an integer.

    **Raises:** `ValueError` for what is none, or too small, or traced.
    """
    kind = "a whole number" if least is None else f"a whole number from {least} on"
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError  # though it has an index
        found = operator.index(value)
    except TypeError:
        known = ", known when tracing" if isinstance(value, Tracer) else ""
        raise ValueError(f"{name} must be {kind}{known}, got {shown(value)}") from None
    if least is not None and found < least:
        raise ValueError(f"{name} must be at least {least}, got {found}")
    return found


def flag(name: str, value: Any) -> bool:
    """As a bool; `ValueError` for what is none."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    known = ", known when tracing" if isinstance(value, Tracer) else ""
    raise ValueError(f"{name} must be True or False{known}, got {shown(value)}")


def choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"unknown {name} {shown(value)}; choose one of {known}")


def float_dtype(name: str, value: Any, also: str | None = None) -> Any:
    """As a dtype of 16 bits or more; `None` stays."""
    if value is None:
        return None
    try:
        found = jnp.dtype(value)
    except (TypeError, ValueError):
        found = None
    if found is None or found.name not in (*FLOATS, also):
        known = " or ".join(filter(None, (", ".join(FLOATS), also, "None")))
        raise ValueError(
            f"{name} must be a float dtype, one of {known}; got {shown(value)}"
        )
    return found


def is_float(dtype: Any) -> bool:
    """True for a real or complex float of 16 bits or more."""
    return jnp.issubdtype(dtype, np.inexact) and jnp.finfo(dtype).dtype.name in FLOATS


def array(name: str, value: Any, *, real: bool = False) -> jax.Array:
    """As an array of numbers or bools; `ValueError` for what is none."""
    try:
        x = jnp.asarray(value)
    except (TypeError, ValueError):
        x = None
    if x is None or not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise ValueError(f"{name} must be an array, got {shown(value)}")
    if real and jnp.iscomplexobj(x):
        raise ValueError(f"{name} must be real, got {shown(value)}")
    return x


def function_or_none(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {shown(value)}")


def transformation(name: str, value: Any) -> None:
    if not all(callable(getattr(value, part, None)) for part in ("init", "update")):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation, such as "
            f"mc.muonclip(1e-3), got {shown(value)}"
        )


def shown(value: Any) -> str:
    """As messages write it, in short."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} {tuple(value.shape)}"
    if callable(value):
        return f"the function {getattr(value, '__qualname__', repr(value))}"
    return reprlib.repr(value)


def _is_real(value: Any) -> bool:
    dtype = getattr(value, "dtype", type(value))
    if dtype not in (int, float) and not hasattr(value, "dtype"):
        return False
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer))

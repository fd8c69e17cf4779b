"""From what the user asked for to a `Solver`, and the errors where it cannot work."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from .coefficients import check_schedule, resolve_schedule, Schedule, Triple
from .precondition import Preconditioning
from .solver import Kernel, Method, Solver


def make_solver(
    ns_coeffs: str | Triple | Schedule,
    ns_steps: int | jax.Array,
    method: Method,
    dtype: DTypeLike | None,
    preconditioning: Preconditioning,
    kernel: Kernel,
    *,
    prefix: str = "",
) -> Solver:
    """Raises `ValueError` for what cannot work; `prefix` is that of the arguments."""
    _check_choice(f"{prefix}method", method, Method)
    _check_choice("preconditioning", preconditioning, Preconditioning)
    _check_choice(f"{prefix}kernel", kernel, Kernel)
    schedule = resolve_schedule(ns_coeffs, ns_steps)
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(f"{prefix}dtype must be a float dtype, got {dtype}")
        check_schedule(schedule, jnp.finfo(dtype).dtype.name)
    steps = ns_steps if isinstance(ns_steps, Tracer) else None
    return Solver(schedule, method, dtype, preconditioning, kernel, steps)


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        known = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"unknown {name} {value!r}; choose one of {known}")

"""What a user may say about the iteration, checked."""

from typing import get_args, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .coefficients import check_schedule, resolve_schedule, Schedule, Triple


Method = Literal["auto", "standard", "gram"]
Preconditioning = Literal["frobenius", "aol"]
Kernel = Literal["xla", "pallas"]


class Options(NamedTuple):
    """The static part of a Newton-Schulz iteration."""

    schedule: Schedule
    method: Method
    dtype: jnp.dtype | None
    preconditioning: Preconditioning
    kernel: Kernel


def resolve_options(
    ns_coeffs: str | Triple | Schedule,
    ns_steps: int | jax.Array,
    method: Method,
    dtype: DTypeLike | None,
    preconditioning: Preconditioning,
    kernel: Kernel,
) -> Options:
    """Raises `ValueError` for what cannot work."""
    _check_choice("method", method, Method)
    _check_choice("preconditioning", preconditioning, Preconditioning)
    _check_choice("kernel", kernel, Kernel)
    schedule = resolve_schedule(ns_coeffs, ns_steps)
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(f"Newton-Schulz needs a floating-point dtype, got {dtype}")
        check_schedule(schedule, jnp.finfo(dtype).dtype.name)
    return Options(schedule, method, dtype, preconditioning, kernel)


def _check_choice(name: str, value: str, choices) -> None:
    if value not in get_args(choices):
        known = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"unknown {name} {value!r}; choose one of {known}")

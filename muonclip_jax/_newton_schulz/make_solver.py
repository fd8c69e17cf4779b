"""From what the user asked for to a `Solver`, and the errors where it cannot work."""

from typing import get_args

import jax
from jax.core import Tracer
from jax.typing import DTypeLike

from .._options import choice, float_dtype
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
    choice(f"{prefix}method", method, get_args(Method))
    choice("preconditioning", preconditioning, get_args(Preconditioning))
    choice(f"{prefix}kernel", kernel, get_args(Kernel))
    schedule = resolve_schedule(ns_coeffs, ns_steps)
    iterated = float_dtype(f"{prefix}dtype", dtype)
    if iterated is not None:
        check_schedule(schedule, iterated.name)
    steps = ns_steps if isinstance(ns_steps, Tracer) else None
    return Solver(schedule, method, iterated, preconditioning, kernel, steps)

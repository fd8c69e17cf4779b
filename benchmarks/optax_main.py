"""optax's Muon as its main branch has it, made from the released one."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import optax


RELEASED = f"optax {optax.__version__}"


def as_on_main(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon of the main branch, from the same of the release."""
    return tx._replace(update=not_unrolled(tx.update))


def not_unrolled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with the loop of Newton-Schulz as on the main branch.

    That no longer unrolls it (commit 0d67475c, 2026-03-31; in November 2026 in no
    release): less memory, and on CPU less time. Nothing else of Muon's arithmetic
    differs from 0.2.8, so this is the program to compare with.

    **Raises:** `RuntimeError` if no loop was to be unrolled: then the release does what
    the main branch does, and this file may go.
    """
    loop, unrolled = jax.lax.fori_loop, []

    def rolled(*args: Any, unroll: Any = None) -> Any:
        unrolled.append(unroll)
        return loop(*args, unroll=False)

    @functools.wraps(function)
    def on_main(*args: Any, **kwargs: Any) -> Any:
        unrolled.clear()
        with mock.patch.object(jax.lax, "fori_loop", rolled):
            result = function(*args, **kwargs)
        if True not in unrolled:
            raise RuntimeError(f"{RELEASED} unrolls no loop: it is as its main branch")
        return result

    return on_main

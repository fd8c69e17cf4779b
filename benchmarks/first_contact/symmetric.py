"""The symmetric kernel on NVIDIA Hopper: whether it is right, and what it gains."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .rounding import normal, relative_error, units
from .rows import Checks, Compared, Outcome, Parts, Timed
from .times import Times


#: How many times faster than the plain product lets it into the package.
WANTED = 1.2
HOPPER = "9.0"
ROWS = (1024, 2048, 4096)
COUNT = 8  # matrices in a stack
DTYPE = "float16"
SQUARE = "r + alpha r r"


class Operands(NamedTuple):
    """Of `alpha x y' + c`, which is symmetric."""

    x: jax.Array
    y: jax.Array
    c: jax.Array | None
    alpha: float

    def exact(self) -> np.ndarray:
        x, y = (np.asarray(each, np.float64) for each in (self.x, self.y))
        c = 0 if self.c is None else np.asarray(self.c, np.float64)
        return self.alpha * (x @ y.mT) + c


def gram(count: int, m: int, n: int) -> Operands:
    """With singular values of about one, as the iteration has them."""
    x = (normal(0, count, m, n) / n**0.5).astype(DTYPE)
    return Operands(x, x, None, 1.0)


def square_and_sum(count: int, m: int) -> Operands:
    """`r + alpha r r`; r is symmetric to the last bit, and its norm is about 2."""
    x = normal(1, count, m, m) / (2 * m) ** 0.5
    r = (x + x.mT).astype(DTYPE)
    return Operands(r, r, r, -1.5)


def symmetric_checks(count: int) -> Checks:
    """Checks stacks of matrices with three rows of blocks, and with four.

    From a count of 14 on there are more tiles than multiprocessors, so that buffers are
    used again.
    """
    sides = {"gram": gram(count, 768, 320), SQUARE: square_and_sum(count, 1024)}
    return {
        f"symmetric kernel, {what}, {name}": functools.partial(check, operands)
        for name, operands in sides.items()
        for what, check in (("error", error_of), ("two halves", difference_of_halves))
    }


def error_of(operands: Operands) -> Outcome:
    """Rounded once: half a unit in each entry, and sums in float32."""
    if reason := missing():
        return reason
    found = by_kernel(*operands)
    return Compared(relative_error(found, operands.exact()), units(1, DTYPE))


def difference_of_halves(operands: Operands) -> Outcome:
    """Is 0 off the diagonal's blocks, where one is the other's mirror image."""
    from .symmetric_kernel import BLOCK

    if reason := missing():
        return reason
    found = np.asarray(by_kernel(*operands), np.float64)
    block = np.arange(found.shape[-1]) // BLOCK
    mirrored = (found - found.mT)[:, block[:, None] != block]
    return Compared(float(np.max(np.abs(mirrored))), 0.0)


def symmetric_parts(times: Times) -> Parts:
    return {"symmetric kernel": functools.partial(against_plain, times)}


def against_plain(times: Times) -> Iterator[Timed]:
    if reason := missing():
        yield Timed(f"symmetric kernel: {reason}")
        return
    for m in ROWS:
        sides = {
            "gram": gram(COUNT, m, 4 * m),
            "r + alpha r r": square_and_sum(COUNT, m),
        }
        for name, operands in sides.items():
            shape = operands.x.shape
            arrays, alpha = operands[:3], operands.alpha
            later = jax.jit(functools.partial(by_kernel, alpha=alpha, in_flight=1))
            plain = jax.jit(functools.partial(by_matmul, alpha=alpha))
            ours = jax.jit(functools.partial(by_kernel, alpha=alpha))
            yield from times.against(
                f"symmetric kernel, {name} of {shape}, wanted {WANTED} times,",
                {
                    "ours": functools.partial(ours, *arrays),
                    "the plain product": functools.partial(plain, *arrays),
                    "the same, a product in flight": functools.partial(later, *arrays),
                },
                2 * shape[0] * m * m * shape[-1],
            )


def by_kernel(x: Any, y: Any, c: Any, alpha: float, in_flight: int = 0) -> jax.Array:
    from .symmetric_kernel import symmetric_product

    (chip, *_) = jax.devices()
    return symmetric_product(
        x,
        y,
        c,
        alpha=alpha,
        in_flight=in_flight,
        multiprocessors=chip.core_count,
    )


def by_matmul(x: Any, y: Any, c: Any, alpha: float) -> jax.Array:
    """One call of cuBLAS, as the package has it."""
    found = jnp.asarray(alpha, x.dtype) * jnp.matmul(x, y.mT)
    return found if c is None else found + c


def missing() -> str | None:
    chip = jax.devices()[0]
    is_hopper = getattr(chip, "compute_capability", None) == HOPPER
    return None if is_hopper else "no Hopper GPU here"

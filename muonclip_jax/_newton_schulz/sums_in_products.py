"""Newton-Schulz in float16 as products that carry their sums: for cuBLAS.

cuBLAS writes `alpha P Q + C`, rounded once, in the dtype of P, Q and C. XLA asks it for
that where a product of 16 bits is multiplied by a constant and C has no factor. To need
none, X and R are held in units, Y = s X and r = u R, and a step is

    r = alpha Y Y^T,  z = r + square r r,  Y = Y + share z Y

with `u = alpha s^2`, `square = c / (b u)` and `share = b / (a u)`. In exact arithmetic
`I + share z` is `(a I + b R + c R^2) / a`, so s is divided by a. In a pass of several
steps all but the last round `q = I + share z` with its diagonal; R of the next step is
`q R q`, and u is divided by `a^2`.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .coefficients import Schedule
from .iteration import Passes


#: s at first, the same for all schedules. Entries of X, at most 2, and of R, at most 4,
#: stay below 2^16, where float16 overflows. Entries of the size of a root mean square,
#: 2^-12 in a matrix of 4,096 x 4,096, stay above 2^-14, where it loses bits.
UNIT = 2.0**10
#: Where s leaves this range X is multiplied by a power of two, by a kernel of its own.
#: No preset comes there.
UNITS = (2.0**-6, 2.0**11)
#: Singular values on which factors are compared.
VALUES = np.geomspace(1e-2, 1, 64)


class Factors(NamedTuple):
    """The factors of a pass."""

    lift: float  # of X before the pass; nearly always 1
    gram: float
    squares: tuple[float, ...]  # of each step
    shares: tuple[float, ...]


def can_add(passes: Passes, dtype: jnp.dtype) -> bool:
    """Whether the form exists: units are quotients of every step's a and b."""
    return dtype == jnp.float16 and all(a and b for p in passes for a, b, _ in p)


def iterate(y: jax.Array, passes: Passes, nth: int | None) -> jax.Array:
    """Runs all steps on `UNIT` X; returns X in float32.

    `nth`: of the stacks of one shape in a program. XLA merges equal constants, and
    moves none into a product that another needs, so each stack has units of its own.
    Such a stack leaves in float32, if by a product without a sum: XLA would keep all in
    float16 until the end, as large as half the model. None for a stack in a loop.
    """
    factors, s, _ = _factors(passes, nth or 0)
    for of_pass in factors[:-1]:
        y = _after(of_pass, y)
    y = _after(factors[-1], y, leaves=nth is not None)
    return y.astype(jnp.float32) * np.float32(1 / s)


# Compiled, so that passes which are equal are traced once.
@functools.partial(jax.jit, static_argnums=0, static_argnames="leaves")
def _after(factors: Factors, y: jax.Array, leaves: bool = False) -> jax.Array:
    if factors.lift != 1:
        # In float32, since float16 does not have every such factor.
        y = (y.astype(jnp.float32) * np.float32(factors.lift)).astype(y.dtype)
    is_tall = y.shape[-2] > y.shape[-1]
    r = _product(*((y.mT, y) if is_tall else (y, y.mT)), factors.gram)
    *early, last = zip(factors.squares, factors.shares, strict=True)
    total = None
    for square, share in early:
        z = _product(r, r, square, r) if square else r
        # Broadcast here, since users may forbid JAX to promote ranks.
        one = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=jnp.float32), r.shape)
        q = (np.float32(share) * z.astype(jnp.float32) + one).astype(r.dtype)
        # q r q, with one product by q, and one by z. Two by q would bring its rounding
        # of large singular values to small ones; two by z would share a factor.
        r = _product(r, q)
        r = _product(z, r, share, r)
        total = q if total is None else _product(total, q)
    square, share = last
    z = _product(r, r, square, r) if square else r
    if total is None:
        return _product(*((y, z) if is_tall else (z, y)), share, y)
    total = _product(total, z, share, total)
    both = (y, total) if is_tall else (total, y)
    if leaves:
        return jnp.matmul(*both, preferred_element_type=jnp.float32)
    return _product(*both)


def _product(
    p: jax.Array, q: jax.Array, alpha: float = 1.0, c: jax.Array | None = None
) -> jax.Array:
    """Returns `alpha P Q + C`, rounded once."""

    def summed_in(dtype: Any):
        def one(p: jax.Array, q: jax.Array, *c: jax.Array) -> jax.Array:
            result = jnp.matmul(p, q, preferred_element_type=dtype)
            if alpha != 1:
                result = result * jnp.asarray(np.float16(alpha), dtype)
            for x in c:
                result = result + x.astype(dtype)
            return result.astype(p.dtype)

        return one

    # On GPU all is one kernel, to which a sum in float32 would add one. On CPU, where
    # tests run, a sum in float16 would round three times.
    return jax.lax.platform_dependent(
        *((p, q) if c is None else (p, q, c)),
        cpu=summed_in(jnp.float32),
        default=summed_in(p.dtype),
    )


@functools.cache
def _factors(
    passes: Passes, nth: int
) -> tuple[tuple[Factors, ...], float, frozenset[float]]:
    """Returns the factors of the `nth` stack, which no earlier one has, and the last s.

    Last come all factors that are used up to here.
    """
    exact = VALUES
    for triple in itertools.chain(*passes):
        exact = _step(exact, *triple)
    used = set(_factors(passes, nth - 1)[-1] if nth else ())
    factors, s, values = [], UNIT, VALUES
    for i, steps in enumerate(passes):
        is_held = UNITS[0] <= s <= UNITS[1]
        lift = 1.0 if is_held else 2.0 ** round(math.log2(UNIT / s))
        s *= lift
        later = tuple(itertools.chain(*passes[i + 1 :]))
        choice = _FactorChoice(steps, s, values)
        best = choice.best(exact, later, used)
        factors.append(choice.factors(best)._replace(lift=lift))
        values = choice.values[best]
        s /= math.prod(a for a, _, _ in steps)
    return tuple(factors), s, frozenset(used)


class _FactorChoice:
    """The factors that a pass may have, and what each makes of singular values.

    Every factor is rounded to float16, but alpha is free, and the others follow.
    """

    def __init__(self, steps: Schedule, s: float, values: np.ndarray) -> None:
        # All numbers of float16 from `least` to four times that. With `least` R is held
        # as large as X, but no smaller than it is.
        least = 2.0 ** round(math.log2(max(1, s) / s**2))
        self.grams = np.outer([least, 2 * least], 1 + np.arange(1024) / 1024).ravel()
        self.squares, self.shares = [], []
        self.values = np.broadcast_to(values, (len(self.grams), len(values)))
        u = self.grams * s**2
        for a, b, c in steps:
            square, share = _rounded(c / (b * u)), _rounded(b / (a * u))
            self.squares.append(square)
            self.shares.append(share)
            coefficients = share * a * u, share * square * a * u**2
            self.values = _step(self.values, a, *(x[:, None] for x in coefficients))
            # z where singular values are 1. The last one decides, whose error is large
            # for `I + share z`. Near the next power of two float16 is the most exact.
            self.is_exact = 2 * np.frexp(np.abs(u * (1 + c / b)))[0] >= 1.4
            u = u / a**2

    def best(self, exact: np.ndarray, later: Schedule, used: set[float]) -> int:
        """Returns the index of the most exact factors that are not used so far."""
        values = self.values
        for triple in later:
            values = _step(values, *triple)
        error = np.square(values / exact - 1).mean(1)
        order = np.lexsort([error, ~self.is_exact]).tolist()
        rows = np.stack([self.grams, *self.squares, *self.shares], axis=1).tolist()
        best = next((k for k in order if used.isdisjoint(rows[k])), order[0])
        used.update(x for x in rows[best] if x)
        return best

    def factors(self, k: int) -> Factors:
        squares, shares = (
            tuple(float(x[k]) for x in each) for each in (self.squares, self.shares)
        )
        return Factors(1.0, float(self.grams[k]), squares, shares)


def _step(x: np.ndarray, a: float, b: Any, c: Any) -> np.ndarray:
    return (a + (b + c * x**2) * x**2) * x


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)

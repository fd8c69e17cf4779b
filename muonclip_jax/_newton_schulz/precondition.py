"""What happens to a matrix before the first step: singular values into [0, 1]."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


Preconditioning = Literal["frobenius", "aol", "equilibrated"]

#: A row or column with less than this share of the mean square is not lifted to the
#: rest: what is a thousandth in size may be rounding errors.
NOISE = 1e-6


def precondition(x: jax.Array, kind: Preconditioning) -> jax.Array:
    """Scales `(..., m, n)`, the short side first, in float32 or better."""
    y = _divide_by_norm(x.astype(np.promote_types(x.dtype, jnp.float32)))
    if kind == "equilibrated":
        return _equilibrated(y)
    return _almost_orthogonal(y) if kind == "aol" else y


@jax.custom_jvp
def _divide_by_norm(x: jax.Array) -> jax.Array:
    """Divides by the Frobenius norm, reading once."""
    factor, norm = _factor_and_norm(x)
    return x * factor / jnp.where(norm > 0, norm, 1)


@_divide_by_norm.defjvp
def _divide_by_norm_jvp(primals, tangents):
    # By the rules for what is below, 0 would meet infinity in the sums that do not
    # count. A zero matrix has no derivative; this gives it one of 0.
    ((x,), (dx,)) = primals, tangents
    factor, norm = _factor_and_norm(x)
    y = x * factor / jnp.where(norm > 0, norm, 1)
    dy = dx * factor / jnp.where(norm > 0, norm, jnp.inf)
    along = jnp.sum(jnp.real(y.conj() * dy), axis=(-2, -1), keepdims=True)
    return y, dy - y * along


def _factor_and_norm(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two, and the Frobenius norm of `x` times that.

    The square of 1e-30 or 1e30 leaves float32. So squares are summed as they are, of
    numbers shrunk and of numbers enlarged, and the sum that stayed in range counts.
    """
    exponent = 5 * jnp.finfo(x.dtype).maxexp // 8
    real = jnp.finfo(x.dtype).dtype
    # Known to the compiler, it might square the factors first.
    shrink, enlarge = jax.lax.optimization_barrier(
        (jnp.asarray(2.0**-exponent, real), jnp.asarray(2.0**exponent, real))
    )
    total = _sum_of_squares(x)
    is_large, is_small = total > 2.0**exponent, total < 2.0**-exponent

    def choose(large, usual, small):
        return jnp.where(is_large, large, jnp.where(is_small, small, usual))

    large, small = _sum_of_squares(x * shrink), _sum_of_squares(x * enlarge)
    return choose(shrink, 1, enlarge), jnp.sqrt(choose(large, total, small))


def _sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.real(x * x.conj()), axis=(-2, -1), keepdims=True)


def _almost_orthogonal(x: jax.Array) -> jax.Array:
    """Divides row `i` by the root of the sum over `j` of `|X X^T|_ij`.

    No singular value then exceeds 1 (Prach and Lampert, arXiv:2208.03160, Theorem 1).
    """
    sums = jnp.sum(jnp.abs(x @ x.mT.conj()), axis=-1, keepdims=True)
    return x * jnp.where(sums > 0, jax.lax.rsqrt(jnp.where(sums > 0, sums, 1)), 0)


def _equilibrated(x: jax.Array) -> jax.Array:
    """Gives rows one norm, and then columns, which hardly changes that of the rows.

    The result is not the polar factor of `x`, but that of one with even rows and
    columns (MuonEq, arXiv:2603.28254).
    """
    for axis in (-1, -2):
        squares = jnp.sum(jnp.real(x * x.conj()), axis=axis, keepdims=True)
        squares += NOISE * jnp.mean(squares, axis=(-2, -1), keepdims=True)
        x = x * jax.lax.rsqrt(jnp.where(squares > 0, squares, 1))
    return _divide_by_norm(x)

"""Matrices before the first step: singular values into [0, 1]."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from .iteration import adjoint


Preconditioning = Literal["frobenius", "aol", "equilibrated"]

#: A row or column with less than this share of the mean square is not lifted to the
#: rest: what is a thousandth in size may be rounding errors.
NOISE = 1e-6


def precondition(parts: Sequence[jax.Array], kind: Preconditioning) -> jax.Array:
    """Scales `(..., m, n)` in float32 or wider; of parts of a stack it makes one.

    Norms are those of parts, so that a stack is formed but once, scaled: a GPU would
    write it, and read it again for the norms.
    """
    y = _divide_by_norm(
        tuple(x.astype(np.promote_types(x.dtype, jnp.float32)) for x in parts)
    )
    if kind == "frobenius":
        return y
    wide = y.mT if y.shape[-2] > y.shape[-1] else y
    if kind == "equilibrated":
        wide = _divide_by_norm((_equilibrated(wide),))
    else:
        wide = _almost_orthogonal(wide)
    return wide.mT if y.shape[-2] > y.shape[-1] else wide


@jax.custom_jvp
def _divide_by_norm(parts: tuple[jax.Array, ...]) -> jax.Array:
    x, factor, norm = _with_norms(parts)
    y = x * factor
    # The norm is 0 where all of y is. A condition on it would be one more kernel for
    # every leaf on GPU.
    return jnp.where(y == 0, y, y / norm)


@_divide_by_norm.defjvp
def _divide_by_norm_jvp(primals, tangents):
    # d(x / |x|) = (dx - y <y, dx>) / |x|, with y = x / |x|. By the rules for what is
    # above, 0 would meet infinity in the sums that do not count. A zero matrix has no
    # derivative; this gives it one of 0.
    ((parts,), (dparts,)) = primals, tangents
    (x, factor, norm), dx = _with_norms(parts), jnp.concatenate(dparts)
    y = x * factor / jnp.where(norm > 0, norm, 1)
    dy = dx * factor / jnp.where(norm > 0, norm, jnp.inf)
    along = jnp.sum(jnp.real(y.conj() * dy), axis=(-2, -1), keepdims=True)
    return y, dy - y * along


def _with_norms(
    parts: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The stack of some parts, a factor for each of its matrices, and their norms."""
    factors, norms = zip(*map(norm_by_squares, parts), strict=True)
    return jnp.concatenate(parts), jnp.concatenate(factors), jnp.concatenate(norms)


def norm_by_squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two, and the Frobenius norms times that, as `(..., 1, 1)`.

    The square of 1e-30 or of 1e30 leaves float32, so squares are summed as they are, of
    numbers shrunk and of numbers enlarged. The sum that stayed in range counts.
    """
    # 5/8 of the exponents: 2^80 in float32, so that a sum between 2^-80 and 2^80 has
    # lost nothing, and numbers beyond, down to 2^-126, have squares in range once they
    # are multiplied by 2^80: 2^-92.
    exponent = 5 * jnp.finfo(x.dtype).maxexp // 8
    real = jnp.finfo(x.dtype).dtype
    # Known to the compiler, it might square the factors first.
    shrink, enlarge = jax.lax.optimization_barrier(
        (jnp.asarray(2.0**-exponent, real), jnp.asarray(2.0**exponent, real))
    )
    total, small, large = (
        jnp.sum(jnp.real(y * y.conj()), axis=(-2, -1), keepdims=True)
        for y in (x, x * enlarge, x * shrink)
    )
    is_large, is_small = total > 2.0**exponent, total < 2.0**-exponent
    factor = jnp.where(is_large, shrink, jnp.where(is_small, enlarge, 1))
    counts = jnp.where(is_large, large, jnp.where(is_small, small, total))
    return factor, jnp.sqrt(counts)


def _almost_orthogonal(x: jax.Array) -> jax.Array:
    """Divides row `i` by the root of the sum over `j` of `|X X^H|_ij`.

    No singular value then exceeds 1 (Prach and Lampert, arXiv:2208.03160, Theorem 1).
    """
    sums = jnp.sum(jnp.abs(x @ adjoint(x)), axis=-1, keepdims=True)
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
    return x

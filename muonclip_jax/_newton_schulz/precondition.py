"""What happens to a matrix before the first step: singular values into [0, 1]."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from .hermitian_blocks import is_tall
from .norms import norm_by_hypotenuses, norm_by_squares, put_together, ScaledNorm


Preconditioning = Literal["frobenius", "aol", "equilibrated"]

#: A row or column with less than this share of the mean square is not lifted to the
#: rest: what is a thousandth in size may be rounding errors.
NOISE = 1e-6


def precondition(
    parts: Sequence[jax.Array], kind: Preconditioning, *, on_gpu: bool
) -> jax.Array:
    """Scales `(..., m, n)` in float32 or better.

    Of several parts, `(count, m, n)` each, it makes one.
    """
    norm = norm_by_hypotenuses if on_gpu else norm_by_squares
    dtype = np.promote_types(parts[0].dtype, jnp.float32)
    y = _divide_by_norm(tuple(x.astype(dtype) for x in parts), norm)
    if kind == "frobenius":
        return y
    wide = y.mT if is_tall(y) else y
    if kind == "equilibrated":
        wide = _divide_by_norm((_equilibrated(wide),), norm)
    else:
        wide = _almost_orthogonal(wide)
    return wide.mT if is_tall(y) else wide


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _divide_by_norm(parts: tuple[jax.Array, ...], scaled_norm: ScaledNorm) -> jax.Array:
    """Divides by the Frobenius norm, reading once."""
    factor, norm = scaled_norm(parts)
    y = put_together(parts) * factor
    # The norm is 0 where all of y is. A condition on it would be one more kernel for
    # every leaf on GPU.
    return jnp.where(y == 0, y, y / norm)


@_divide_by_norm.defjvp
def _divide_by_norm_jvp(scaled_norm, primals, tangents):
    # By the rules for what is below, 0 would meet infinity in the sums that do not
    # count. A zero matrix has no derivative; this gives it one of 0.
    ((parts,), (dparts,)) = primals, tangents
    x, dx = put_together(parts), put_together(dparts)
    factor, norm = scaled_norm(parts)
    y = x * factor / jnp.where(norm > 0, norm, 1)
    dy = dx * factor / jnp.where(norm > 0, norm, jnp.inf)
    along = jnp.sum(jnp.real(y.conj() * dy), axis=(-2, -1), keepdims=True)
    return y, dy - y * along


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
    return x

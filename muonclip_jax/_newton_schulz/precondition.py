"""Matrices before the first step: singular values into [0, 1]."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from .products import adjoint, is_tall, widen


Preconditioning = Literal["frobenius", "aol", "equilibrated"]

#: From `(..., m, n)` to a power of two and the Frobenius norms of the matrices times
#: that, as `(..., 1, 1)`. The square of 1e-30 or of 1e30 leaves float32, so that a sum
#: of squares alone is not enough.
Norm = Callable[[jax.Array], tuple[jax.Array, jax.Array]]

#: A row or column with less than this share of the mean square is not lifted to the
#: rest: what is a thousandth in size may be rounding errors.
NOISE = 1e-6


def precondition(
    parts: Sequence[jax.Array], kind: Preconditioning, norm: Norm
) -> jax.Array:
    """Scales `(..., m, n)` in float32 or wider; of parts of a stack it makes one.

    Norms are those of parts, so that a stack is formed but once, scaled: a GPU would
    write it, and read it again for the norms.
    """
    y = _divide_by_norm(tuple(map(widen, parts)), norm)
    if kind == "frobenius":
        return y
    wide = y.mT if is_tall(y) else y
    if kind == "equilibrated":
        wide = _divide_by_norm((_equilibrated(wide),), norm)
    else:
        wide = _almost_orthogonal(wide)
    return wide.mT if is_tall(y) else wide


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _divide_by_norm(parts: tuple[jax.Array, ...], scaled_norm: Norm) -> jax.Array:
    x, factor, norm = _with_norms(parts, scaled_norm)
    y = x * factor
    # The norm is 0 where all of y is. A condition on it would be one more kernel for
    # every leaf on GPU.
    return jnp.where(y == 0, y, y / norm)


@_divide_by_norm.defjvp
def _divide_by_norm_jvp(scaled_norm, primals, tangents):
    # d(x / |x|) = (dx - y <y, dx>) / |x|, with y = x / |x|. By the rules for what is
    # above, 0 would meet infinity in the sums that do not count. A zero matrix has no
    # derivative; this gives it one of 0.
    ((parts,), (dparts,)) = primals, tangents
    (x, factor, norm), dx = _with_norms(parts, scaled_norm), jnp.concatenate(dparts)
    y = x * factor / jnp.where(norm > 0, norm, 1)
    dy = dx * factor / jnp.where(norm > 0, norm, jnp.inf)
    along = jnp.sum(jnp.real(y.conj() * dy), axis=(-2, -1), keepdims=True)
    return y, dy - y * along


def _with_norms(
    parts: Sequence[jax.Array], scaled_norm: Norm
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The stack of some parts, a factor for each of its matrices, and their norms."""
    factors, norms = zip(*map(scaled_norm, parts), strict=True)
    return jnp.concatenate(parts), jnp.concatenate(factors), jnp.concatenate(norms)


def norm_by_squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums squares as they are, of numbers shrunk and of numbers enlarged.

    The sum that stayed in range counts.
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


def norm_by_hypotenuses(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reduces by `sqrt(a^2 + b^2)`, which stays in range throughout.

    It is one sum, which compilers for GPU form while they write what it is of; of three
    they read that again. The root takes no time next to the memory there; a CPU takes
    several times as long for it as for three sums of squares.
    """

    def hypotenuse(a: jax.Array, b: jax.Array) -> jax.Array:
        large, small = jnp.maximum(a, b), jnp.minimum(a, b)
        ratio = small / jnp.where(large > 0, large, 1)
        return large * jnp.sqrt(1 + ratio * ratio)

    entries = math.prod(x.shape[-2:])
    # The norm of all of them is finite where they are, rounded up or not.
    factor = 2.0 ** -math.ceil(1 + math.log2(max(1, entries)) / 2)
    norm = jnp.abs(x) * factor
    for axis in (x.ndim - 1, x.ndim - 2):
        norm = jax.lax.reduce(norm, jnp.zeros((), norm.dtype), hypotenuse, (axis,))
    norm = norm[..., None, None]
    # Compilers multiply by its reciprocal, which has to be in range too.
    exponent = jnp.finfo(norm.dtype).maxexp // 2
    is_large, is_small = norm > 2.0**exponent, norm < 2.0**-exponent
    change = jnp.where(is_large, 2.0**-exponent, jnp.where(is_small, 2.0**exponent, 1))
    change = change.astype(norm.dtype)
    return factor * change, norm * change


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

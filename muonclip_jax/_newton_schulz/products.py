"""The products of the iteration: in which precision, rounded when, and by what kernel.

Products accumulate in float32 or wider, coefficients are float32 or wider, and so are
sums unless `fused`. What enters a product is rounded to the dtype of the iteration.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from . import hermitian_blocks
from .hermitian_blocks import Hermitian, is_tall, mean_diagonal, Rows


class Products(NamedTuple):
    """How to multiply. Rows and Hermitian matrices are trees of blocks."""

    gram: Callable[[Rows], Hermitian]  # X X^H, rounded
    # square R^2 + linear R, rounded; with `widened`, R^2 is not rounded before
    polynomial: Callable[..., Hermitian]
    combine: Callable[..., Hermitian]  # P Q + keep addend, rounded or not
    apply: Callable[..., Rows]  # P X + keep X, not rounded
    sum_and_mean: Callable[..., tuple[Hermitian, jax.Array]]  # of P + keep Q, widened
    resizes: bool  # whether a multiple of what `apply` returns costs nothing


def xla_products(dtype: jnp.dtype, *, exact: bool, fused: bool = False) -> Products:
    """`exact` for products of float32 from which accelerators would drop bits.

    `fused` for libraries that add to a product before they round it, and store it: sums
    then have the dtype of the factors, and but for `keep` no coefficient.
    """
    precision = jax.lax.Precision.HIGHEST if exact else None
    sums = dtype if fused else np.promote_types(dtype, jnp.float32)
    matmul = functools.partial(_matmul, precision=precision, dtype=sums)
    matmul_wide = functools.partial(_matmul, precision=precision)

    def gram(rows):
        return round_to(hermitian_blocks.gram_matrix(matmul, rows), dtype)

    def polynomial(r, square, linear, widened):
        matmul_here = matmul_wide if widened else matmul
        product = hermitian_blocks.multiply(matmul_here, r, r)
        return round_to(add(product, r, square, linear), dtype)

    def combine(p, q, addend, keep, rounded: bool = True):
        product = hermitian_blocks.multiply(matmul, p, q)
        total = add(product, addend, 1.0, keep, sums)
        return round_to(total, dtype) if rounded else total

    def apply(p, rows, keep):
        return add(hermitian_blocks.apply(matmul, p, rows), rows, 1.0, keep, sums)

    sum_and_mean = _sum_of_stored if fused else _sum_of_formed
    return Products(gram, polynomial, combine, apply, sum_and_mean, resizes=not fused)


def kernel_products(
    symmetric_product: Callable[..., jax.Array], dtype: jnp.dtype, *, fused: bool
) -> Products:
    """By a kernel for half of `scale x y^T + shift addend`, without blocks."""
    xla = xla_products(dtype, exact=False, fused=fused)
    widened = {} if fused else dict(out_dtype=jnp.float32)

    def call(x, y, addend=None, **options):
        left = _as_stack(x)
        # One array that comes twice is read once.
        right = left if x is y else _as_stack(y)
        if addend is not None:
            options["addend"] = _as_stack(addend)
        out = symmetric_product(left, right, **options)
        return ((out.reshape(*x.shape[:-2], *out.shape[-2:]),),)

    def gram(rows):
        x = rows[0].mT if is_tall(rows[0]) else rows[0]
        return call(x, x)

    def polynomial(r, square, linear, widened):
        del widened  # the sum is float32 in any case
        ((x,),) = r
        return call(x, x, x, scale=_of_each(square), shift=_of_each(linear))

    def combine(p, q, addend, keep, rounded: bool = True):
        (((p,),), ((q,),), ((addend,),)) = p, q, addend
        return call(p, q, addend, shift=keep, **({} if rounded else widened))

    return xla._replace(gram=gram, polynomial=polynomial, combine=combine)


def add(x, y, a: ArrayLike = 1.0, b: ArrayLike = 1.0, dtype: DTypeLike = jnp.float32):
    """`a x + b y` of two trees of blocks, in `dtype` or better."""

    def add_arrays(x, y):
        sums = np.promote_types(x.dtype, dtype)
        return a * x.astype(sums) + b * y.astype(sums)

    return jax.tree.map(add_arrays, x, y)


def round_to(blocks, dtype: DTypeLike):
    """Rounds for good, and once.

    A compiler may drop a conversion there and back, so that a sum would see the R
    before and a product the R after; the Gram form does not survive that. Or it may
    convert anew for every tile of a product, which costs more than the product.
    """

    def round_array(x):
        if x.dtype == dtype:
            return x
        return jax.lax.optimization_barrier(x.astype(dtype))

    return jax.tree.map(round_array, blocks)


def _as_stack(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[-2:])


def _of_each(number: ArrayLike) -> ArrayLike:
    """A number, or one for each matrix of a stack."""
    return number.reshape(-1) if isinstance(number, jax.Array) else number


def widen(x: jax.Array) -> jax.Array:
    """In float32 or better."""
    return x.astype(np.promote_types(x.dtype, jnp.float32))


def _matmul(x: jax.Array, y: jax.Array, precision=None, dtype=jnp.float32) -> jax.Array:
    accumulator = np.promote_types(x.dtype, dtype)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=accumulator)


def _sum_of_formed(p: Hermitian, q: Hermitian, keep: Any):
    """Of a P that is just being formed: what is needed of the sum fuses with it."""
    total = add(p, q, 1.0, keep)
    return total, mean_diagonal(total, _masked_diagonal)


def _sum_of_stored(p: Hermitian, q: Hermitian, keep: Any):
    """Of two that are stored: their diagonals are all that is read for the mean."""
    means = [mean_diagonal(x, _diagonal) for x in (p, q)]
    return add(p, q, 1.0, keep), means[0] + keep * means[1]


def _masked_diagonal(x: jax.Array) -> jax.Array:
    on_diagonal = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=bool), x.shape)
    return jnp.where(on_diagonal, x, 0).sum(axis=-1)


def _diagonal(x: jax.Array) -> jax.Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)

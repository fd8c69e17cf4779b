"""The products of the iteration: in which precision, rounded when, and by what kernel.

Products accumulate in float32, sums and coefficients are float32, and what enters a
product is rounded to the dtype of the iteration.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from . import hermitian_blocks
from .hermitian_blocks import Hermitian, Rows


class Products(NamedTuple):
    """How to multiply. Rows and Hermitian matrices are trees of blocks."""

    gram: Callable[[Rows], Hermitian]  # X X^H, rounded
    combine: Callable[..., Hermitian]  # scale P Q + shift addend, rounded
    multiply: Callable[[Hermitian, Hermitian], Hermitian]  # P Q
    apply: Callable[[Hermitian, Rows], Rows]  # P X


def xla_products(dtype: jnp.dtype, *, exact: bool) -> Products:
    """`exact` for products of float32 from which accelerators would drop bits."""
    precision = jax.lax.Precision.HIGHEST if exact else None
    matmul = functools.partial(_matmul, precision=precision)
    multiply = functools.partial(hermitian_blocks.multiply, matmul)

    def gram(rows):
        return round_to(hermitian_blocks.gram_matrix(matmul, rows), dtype)

    def combine(p, q, addend, *, shift: ArrayLike, scale: ArrayLike = 1.0):
        return round_to(add(multiply(p, q), addend, scale, shift), dtype)

    return Products(
        gram, combine, multiply, functools.partial(hermitian_blocks.apply, matmul)
    )


def kernel_products(
    symmetric_product: Callable[..., jax.Array], dtype: jnp.dtype
) -> Products:
    """By a kernel for half of `scale x y^T + shift addend`, without blocks."""

    def call(x, y, addend=None, **options):
        left = _as_stack(x)
        # One array that comes twice is read once.
        right = left if x is y else _as_stack(y)
        if addend is not None:
            options["addend"] = _as_stack(addend)
        out = symmetric_product(left, right, **options)
        return out.reshape(*x.shape[:-2], *out.shape[-2:])

    def gram(rows):
        return ((call(rows[0], rows[0], out_dtype=dtype),),)

    def combine(p, q, addend, *, shift: float, scale: float = 1.0):
        (((p,),), ((q,),), ((addend,),)) = p, q, addend
        return ((call(p, q, addend, shift=shift, scale=scale, out_dtype=dtype),),)

    def multiply(p, q):
        return ((call(p[0][0], q[0][0], out_dtype=jnp.float32),),)

    return Products(
        gram, combine, multiply, functools.partial(hermitian_blocks.apply, _matmul)
    )


def add(x, y, a: ArrayLike = 1.0, b: ArrayLike = 1.0):
    """`a x + b y` of two trees of blocks, in float32 or better."""
    return jax.tree.map(lambda x, y: a * widen(x) + b * widen(y), x, y)


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


def widen(x: jax.Array) -> jax.Array:
    """In float32 or better."""
    return x.astype(np.promote_types(x.dtype, jnp.float32))


def _matmul(x: jax.Array, y: jax.Array, precision=None) -> jax.Array:
    accumulator = np.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=accumulator)

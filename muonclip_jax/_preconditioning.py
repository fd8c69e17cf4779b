"""What happens to a matrix before the first step: singular values into [0, 1]."""

from typing import get_args, Literal

import jax
import jax.numpy as jnp


Preconditioning = Literal["frobenius", "aol"]


def check_preconditioning(kind: str) -> None:
    if kind not in get_args(Preconditioning):
        raise ValueError(
            f"unknown preconditioning {kind!r}; choose 'frobenius' or 'aol'"
        )


def precondition(x: jax.Array, kind: Preconditioning) -> jax.Array:
    """Scales `(..., m, n)`, the short side first, in float32 or better."""
    y = _divide_by_norm(x)
    return _almost_orthogonal(y) if kind == "aol" else y


def _divide_by_norm(x: jax.Array) -> jax.Array:
    """Divides by the Frobenius norm."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # The square of 1e-30 or 1e30 leaves float32, so the largest entry goes first;
    # the norm is then at least 1 unless the matrix is zero.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    # Compilers divide by multiplying with the reciprocal, which for the largest
    # numbers would be subnormal and flushed to zero.
    shrink = jnp.where(largest > 1, 2.0**-8, 1).astype(largest.dtype)
    divisor = jnp.where(largest < jnp.finfo(x.dtype).tiny, 1, largest * shrink)
    x = (x * shrink) / divisor
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    return x / jnp.maximum(norm, 1)


def _almost_orthogonal(x: jax.Array) -> jax.Array:
    """Divides row `i` by the root of the sum over `j` of `|X X^T|_ij`.

    No singular value then exceeds 1 (Prach and Lampert, arXiv:2208.03160, Theorem 1).
    """
    sums = jnp.sum(jnp.abs(x @ x.mT.conj()), axis=-1, keepdims=True)
    return x * jnp.where(sums > 0, jax.lax.rsqrt(jnp.where(sums > 0, sums, 1)), 0)

"""Frobenius norms of matrices whose squares may leave the range of their dtype.

Each takes parts of a stack, `(..., m, n)`, and returns a power of two and the norms of
the stack times that, as `(..., 1, 1)`. The square of 1e-30 or of 1e30 leaves float32.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


Parts = tuple[jax.Array, ...]
ScaledNorm = Callable[[Parts], tuple[jax.Array, jax.Array]]


def put_together(parts: Parts) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def norm_by_squares(parts: Parts) -> tuple[jax.Array, jax.Array]:
    """Sums squares as they are, of numbers shrunk and of numbers enlarged.

    The sum that stayed in range counts.
    """
    x = put_together(parts)
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


def norm_by_hypotenuses(parts: Parts) -> tuple[jax.Array, jax.Array]:
    """Reduces by `sqrt(a^2 + b^2)`, which stays in range throughout.

    It is one sum, which compilers for GPU form while they write what it is of; of three
    they read that again. The root takes no time beside the memory there.
    """
    entries = math.prod(parts[0].shape[-2:])
    # The norm of all of them is finite where they are, rounded up or not.
    factor = 2.0 ** -math.ceil(1 + math.log2(max(1, entries)) / 2)
    rows = put_together(tuple(_norms(jnp.abs(x) * factor) for x in parts))
    norm = _norms(rows)[..., None, None]
    # Compilers multiply by its reciprocal, which has to be in range too.
    exponent = jnp.finfo(norm.dtype).maxexp // 2
    is_large, is_small = norm > 2.0**exponent, norm < 2.0**-exponent
    change = jnp.where(is_large, 2.0**-exponent, jnp.where(is_small, 2.0**exponent, 1))
    change = change.astype(norm.dtype)
    return factor * change, norm * change


def _norms(x: jax.Array) -> jax.Array:
    """Along the last axis."""
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), _hypotenuse, (x.ndim - 1,))


def _hypotenuse(a: jax.Array, b: jax.Array) -> jax.Array:
    large, small = jnp.maximum(a, b), jnp.minimum(a, b)
    ratio = small / jnp.where(large > 0, large, 1)
    return large * jnp.sqrt(1 + ratio * ratio)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.real(x * x.conj()), axis=(-2, -1), keepdims=True)

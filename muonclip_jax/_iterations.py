"""The two forms of the Newton-Schulz iteration.

Both take `(..., m, n)` with the short side first and iterate in its dtype: products
accumulate in float32, sums and coefficients are float32, and what enters a product is
rounded. `blocks` is the number of row blocks that Hermitian products are computed in;
it changes the cost and not the result.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._coefficients import Schedule
from ._hermitian import (
    add_to_diagonal,
    apply,
    gram_matrix,
    Hermitian,
    join,
    mean_diagonal,
    multiply,
    Rows,
    split,
)
from ._restarts import passes


def standard(x: jax.Array, schedule: Schedule, blocks: int) -> jax.Array:
    return join(functools.reduce(_step, schedule, split(x, blocks)))


def traced(
    x: jax.Array, schedule: Schedule, blocks: int, ns_steps: jax.Array
) -> jax.Array:
    """The standard form for a number of steps known only when it runs."""
    triples = jnp.asarray(schedule, dtype=jnp.float32)
    last = len(schedule) - 1

    def body(i, rows):
        return _step(rows, triples[jnp.minimum(i, last)])

    return join(jax.lax.fori_loop(0, ns_steps, body, split(x, blocks)))


def gram(x: jax.Array, schedule: Schedule, blocks: int) -> jax.Array:
    """Iterates on R = X X^T, which X meets once per pass."""
    rows, dtype = split(x, blocks), x.dtype
    for steps in passes(schedule, dtype.name):
        r = _round(gram_matrix(_exact_matmul, rows), dtype)
        q, shift = _gram_factor(r, steps, dtype)
        rows = _combine(1, apply(_exact_matmul, q, rows), shift, rows, dtype)
    return join(rows)


def _step(rows: Rows, triple) -> Rows:
    a, b, c = triple
    dtype = rows[0].dtype
    gram = gram_matrix(_matmul, rows)
    rounded = _round(gram, dtype)
    square = multiply(_matmul, rounded, rounded)
    polynomial = _combine(b, gram, c, square, dtype)
    return _combine(a, rows, 1, apply(_matmul, polynomial, rows), dtype)


def _gram_factor(
    r: Hermitian, schedule: Schedule, dtype: jnp.dtype
) -> tuple[Hermitian, jax.Array]:
    """Runs all steps on R, gathering in Q + shift I the factor that X owes.

    Multiples of the identity are kept apart, since rounded with the rest they would
    drown it: `a I` of Z + a I, and the mean of the diagonal of Q.
    """
    product = functools.partial(multiply, _exact_matmul)
    combine = functools.partial(_combine, dtype=dtype)
    q, shift = None, jnp.ones(())
    for i, (a, b, c) in enumerate(schedule):
        z = combine(c, product(r, r), b, r)
        q = z if q is None else _sum(product(q, z), _sum(z, q, shift, a))
        q, mean = _centre(q, dtype)
        shift = a * shift + mean
        if i < len(schedule) - 1:
            rz = combine(1, product(r, z), a, r)
            r = combine(1, product(z, rz), a, rz)
    assert q is not None
    return q, shift


def _centre(q: Hermitian, dtype: jnp.dtype) -> tuple[Hermitian, jax.Array]:
    """Takes the mean of the diagonal out."""
    mean = mean_diagonal(q)
    return _round(add_to_diagonal(q, -mean), dtype), mean


def _combine(a, x, b, y, dtype: jnp.dtype):
    """`a x + b y` of two trees of blocks, rounded once."""
    return _round(_sum(x, y, a, b), dtype)


def _sum(x, y, a: ArrayLike = 1.0, b: ArrayLike = 1.0):
    return jax.tree.map(lambda x, y: a * _widen(x) + b * _widen(y), x, y)


def _round(blocks, dtype: jnp.dtype):
    """Rounds for good.

    A compiler may drop a conversion there and back, so that a sum would see the R
    before and a product the R after; the Gram form does not survive that.
    """
    rounded = jax.tree.map(lambda x: x.astype(dtype), blocks)
    return (
        rounded
        if jnp.finfo(dtype).bits >= 32
        else jax.lax.optimization_barrier(rounded)
    )


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _matmul(x: jax.Array, y: jax.Array, precision=None) -> jax.Array:
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=accumulator)


#: Of float32 operands accelerators would drop bits before a product, but not a sum.
_exact_matmul = functools.partial(_matmul, precision=jax.lax.Precision.HIGHEST)

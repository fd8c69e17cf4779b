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
from ._restarts import cut_into_passes


def standard(x: jax.Array, schedule: Schedule, blocks: int) -> jax.Array:
    rows = split(x, blocks)
    for triple in schedule[:-1]:
        rows = _round(_step(rows, triple), x.dtype)
    return join(_step(rows, schedule[-1]))


def traced(
    x: jax.Array, schedule: Schedule, blocks: int, ns_steps: jax.Array
) -> jax.Array:
    """The standard form for a number of steps known only when it runs."""
    triples = jnp.asarray(schedule, dtype=jnp.float32)
    last = len(schedule) - 1

    def body(i, rows):
        return _round(_step(rows, triples[jnp.minimum(i, last)]), x.dtype)

    return join(jax.lax.fori_loop(0, ns_steps, body, split(x, blocks)))


def gram(x: jax.Array, schedule: Schedule, blocks: int) -> jax.Array:
    """Iterates on R = X X^T, which X meets once per pass."""
    *passes, last = cut_into_passes(schedule, x.dtype.name)
    rows = split(x, blocks)
    for steps in passes:
        rows = _round(_pass(rows, steps), x.dtype)
    return join(_pass(rows, last))


def _step(rows: Rows, triple) -> Rows:
    a, b, c = triple
    dtype = rows[0].dtype
    r = _round(gram_matrix(_matmul, rows), dtype)
    polynomial = _round(_sum(multiply(_matmul, r, r), r, c, b), dtype)
    return _sum(apply(_matmul, polynomial, rows), rows, 1.0, a)


def _pass(rows: Rows, schedule: Schedule) -> Rows:
    dtype = rows[0].dtype
    r = _round(gram_matrix(_exact_matmul, rows), dtype)
    q, shift = _gram_factor(r, schedule, dtype)
    return _sum(apply(_exact_matmul, q, rows), rows, 1.0, shift)


def _gram_factor(
    r: Hermitian, schedule: Schedule, dtype: jnp.dtype
) -> tuple[Hermitian, jax.Array]:
    """Runs all steps on R, gathering in Q + shift I the factor that X owes.

    Multiples of the identity are kept apart, since rounded with the rest they would
    drown it: `a I` of Z + a I, and the mean of the diagonal of Q.
    """
    product = functools.partial(multiply, _exact_matmul)
    q, shift = None, jnp.ones(())
    for i, (a, b, c) in enumerate(schedule):
        z = _round(_sum(product(r, r), r, c, b), dtype)
        q = z if q is None else _sum(product(q, z), _sum(z, q, shift, a))
        q, mean = _centre(q, dtype)
        shift = a * shift + mean
        if i < len(schedule) - 1:
            rz = _round(_sum(product(r, z), r, 1.0, a), dtype)
            r = _round(_sum(product(z, rz), rz, 1.0, a), dtype)
    assert q is not None
    return q, shift


def _centre(q: Hermitian, dtype: jnp.dtype) -> tuple[Hermitian, jax.Array]:
    """Takes the mean of the diagonal out."""
    mean = mean_diagonal(q)
    return _round(add_to_diagonal(q, -mean), dtype), mean


def _sum(x, y, a: ArrayLike = 1.0, b: ArrayLike = 1.0):
    """`a x + b y` of two trees of blocks, in float32 or better."""
    return jax.tree.map(lambda x, y: a * _widen(x) + b * _widen(y), x, y)


def _round(blocks, dtype: jnp.dtype):
    return jax.tree.map(lambda x: round_to(x, dtype), blocks)


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds for good, and once.

    A compiler may drop a conversion there and back, so that a sum would see the R
    before and a product the R after; the Gram form does not survive that. Or it may
    convert anew for every tile of a product, which costs more than the product.
    """
    rounded = x.astype(dtype)
    return jax.lax.optimization_barrier(rounded) if x.dtype != dtype else rounded


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _matmul(x: jax.Array, y: jax.Array, precision=None) -> jax.Array:
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=accumulator)


#: Of float32 operands accelerators would drop bits before a product, but not a sum.
_exact_matmul = functools.partial(_matmul, precision=jax.lax.Precision.HIGHEST)

"""The two forms of the Newton-Schulz iteration.

Both take `(..., m, n)` with the short side first and iterate in its dtype. `blocks` is
the number of row blocks that Hermitian products are computed in; like the products
themselves it changes the cost and, but for rounding, not the result.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .coefficients import Schedule
from .gram_restarts import cut_into_passes
from .hermitian_blocks import (
    add_to_diagonal,
    Hermitian,
    join,
    mean_diagonal,
    Rows,
    split,
)
from .products import add, Products, round_to, widen


def standard(
    x: jax.Array, schedule: Schedule, products: Products, blocks: int
) -> jax.Array:
    rows = split(x, blocks)
    for triple in schedule[:-1]:
        rows = round_to(_step(rows, triple, products), x.dtype)
    return join(_step(rows, schedule[-1], products))


def traced(
    x: jax.Array,
    schedule: Schedule,
    products: Products,
    blocks: int,
    ns_steps: jax.Array,
) -> jax.Array:
    """The standard form for a number of steps known only when it runs.

    The result has the dtype of the other forms.
    """
    real = jnp.finfo(x.dtype).dtype
    triples = jnp.asarray(schedule, np.promote_types(real, jnp.float32))
    last = len(schedule) - 1

    def body(i, rows):
        step = _step(rows, triples[jnp.minimum(i, last)], products)
        return round_to(step, x.dtype)

    rows = jax.lax.fori_loop(0, ns_steps, body, split(x, blocks))
    return widen(join(rows))


def gram(
    x: jax.Array, schedule: Schedule, products: Products, blocks: int
) -> jax.Array:
    """Iterates on R = X X^T, which X meets once per pass."""
    *passes, last = cut_into_passes(schedule, x.dtype.name)
    rows = split(x, blocks)
    for steps in passes:
        rows = round_to(_pass(rows, steps, products), x.dtype)
    return join(_pass(rows, last, products))


def _step(rows: Rows, triple, products: Products) -> Rows:
    a, b, c = triple
    r = products.gram(rows)
    polynomial = products.combine(r, r, r, shift=b, scale=c)
    return add(products.apply(polynomial, rows), rows, 1.0, a)


def _pass(rows: Rows, schedule: Schedule, products: Products) -> Rows:
    q, shift = _gram_factor(products.gram(rows), schedule, products)
    return add(products.apply(q, rows), rows, 1.0, shift)


def _gram_factor(
    r: Hermitian, schedule: Schedule, products: Products
) -> tuple[Hermitian, ArrayLike]:
    """Runs all steps on R, gathering in Q + shift I the factor that X owes.

    Multiples of the identity are kept apart, since rounded with the rest they would
    drown it: `a I` of Z + a I, and the mean of the diagonal of Q.
    """
    q, shift, dtype = None, 1.0, r[0][0].dtype
    for i, (a, b, c) in enumerate(schedule):
        z = products.combine(r, r, r, shift=b, scale=c)
        if q is None:
            q, shift = z, a
        else:
            q = add(products.multiply(q, z), add(z, q, shift, a))
            mean = mean_diagonal(q)
            q, shift = round_to(add_to_diagonal(q, -mean), dtype), a * shift + mean
        if i < len(schedule) - 1:
            rz = products.combine(r, z, r, shift=a)
            r = products.combine(z, rz, rz, shift=a)
    assert q is not None
    return q, shift

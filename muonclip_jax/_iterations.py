"""The two forms of the Newton-Schulz iteration.

Both take `(..., m, n)` with the short side first. `blocks` is the number of row blocks
that Hermitian products are computed in; it changes the cost and not the result.
"""

import functools
import math

import jax
import jax.numpy as jnp

from ._coefficients import Schedule
from ._hermitian import (
    add_to_diagonal,
    apply,
    gram_matrix,
    Hermitian,
    join,
    multiply,
    Rows,
    split,
)


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
    """Iterates on `X X^H`, in float32 or better throughout."""
    rows = split(x, blocks)
    for steps in _passes(schedule):
        r = gram_matrix(_exact_matmul, rows)
        q = _gram_factor(r, steps)
        rows = apply(_exact_matmul, q, rows)
    return join(rows)


#: The most that the steps of one pass of the Gram form may lift a small singular value.
#: Keller's five start afresh after the third step and Polar Express after the second.
_PASS_SLOPE = 50.0


def _passes(schedule: Schedule) -> list[Schedule]:
    """Cuts a schedule where the Gram form starts afresh from `X X^H`.

    In exact arithmetic one pass would do. The rounding of R is that of the square of X,
    and the slope at zero of the steps since lifts it: one pass spoils low ranks.
    """
    passes, slope = [], math.inf
    for step in schedule:
        slope *= step[0]
        if slope > _PASS_SLOPE:
            passes.append(())
            slope = step[0]
        passes[-1] += (step,)
    return passes


def _step(rows: Rows, triple) -> Rows:
    """One step; sums and coefficients stay float32, products round to the dtype."""
    a, b, c = triple
    dtype = rows[0].dtype
    gram = gram_matrix(_matmul, rows)
    rounded = jax.tree.map(lambda g: g.astype(dtype), gram)
    square = multiply(_matmul, rounded, rounded)
    polynomial = jax.tree.map(lambda g, s: (b * g + c * s).astype(dtype), gram, square)
    change = apply(_matmul, polynomial, rows)
    return jax.tree.map(lambda x, y: (a * x + y).astype(dtype), rows, change)


def _gram_factor(r: Hermitian, schedule: Schedule) -> Hermitian:
    """Runs all steps on R = X X^H, gathering in Q the factor that X owes."""
    product = functools.partial(multiply, _exact_matmul)
    q = None
    for a, b, c in schedule:
        # a*I stays implicit: adding it to Z would drown the small entries of Z.
        z = _combine(c, product(r, r), b, r)
        q = add_to_diagonal(z, a) if q is None else _combine(1, product(q, z), a, q)
        rz = _combine(1, product(r, z), a, r)
        r = _combine(1, product(z, rz), a, rz)
    assert q is not None
    return q


def _combine(a: float, x: Hermitian, b: float, y: Hermitian) -> Hermitian:
    return jax.tree.map(lambda x, y: a * x + b * y, x, y)


def _matmul(x: jax.Array, y: jax.Array, precision=None) -> jax.Array:
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=accumulator)


_exact_matmul = functools.partial(_matmul, precision=jax.lax.Precision.HIGHEST)

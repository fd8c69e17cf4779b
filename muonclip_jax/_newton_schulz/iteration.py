"""Newton-Schulz's iteration: singular values in [0, 1] to singular values near 1.

A step multiplies X by `a I + b R + c R^2`, with `R = X X^H`. Steps are collected on R, a
pass, and X is multiplied once. The standard form is that with one step a pass; the Gram
form has as many as rounding allows: R is the square of X, and rounded as such.

All act on `(..., m, n)`. A matrix with more rows than columns is iterated from the
other side. What enters a product has been rounded to the dtype of the iteration;
products accumulate in float32 or wider, and coefficients are as wide.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .coefficients import Schedule


Passes = tuple[Schedule, ...]

#: How much the steps of a pass may lift the rounding error of R: the product of the
#: squares of all slopes but the last.
MOST_GROWTH = {"bfloat16": 40.0, "float16": 40.0}
USUAL_GROWTH = 150.0


def one_step_each(schedule: Schedule) -> Passes:
    return tuple((triple,) for triple in schedule)


def collected(schedule: Schedule, dtype: str) -> Passes:
    """As few passes as rounding allows, cut from the end.

    Later passes mend what early ones leave wrong, so the last are the longest.
    """
    most, passes = MOST_GROWTH.get(dtype, USUAL_GROWTH), [schedule[-1:]]
    for triple in schedule[-2::-1]:
        longer = (triple, *passes[0])
        if math.prod(a * a for a, _, _ in longer[:-1]) <= most:
            passes[0] = longer
        else:
            passes.insert(0, (triple,))
    return tuple(passes)


def cost(m: int, n: int, passes: Passes) -> float:
    """Multiplications for a matrix of `(m, n)`, the short side first."""
    # R and what it is applied to take m^2 n each. Of m^3 a step takes one for R^2 if it
    # has a c, and each but the first of a pass three more: R Z, Z R Z and Q Z.
    squares = sum(c != 0 for steps in passes for _, _, c in steps)
    later = sum(len(steps) - 1 for steps in passes)
    return len(passes) * 2 * m * m * n + (squares + 3 * later) * m**3


class Products(NamedTuple):
    """Hermitian products, of two blocks of rows from `2 * block_rows` on.

    The block above the diagonal is mirrored, which leaves 3/4 of the arithmetic.
    """

    dtype: jnp.dtype
    block_rows: float
    precision: jax.lax.Precision | None

    def matmul(self, x: jax.Array, y: jax.Array) -> jax.Array:
        wide = np.promote_types(x.dtype, jnp.float32)
        return jnp.matmul(x, y, precision=self.precision, preferred_element_type=wide)

    def gram(self, x: jax.Array) -> jax.Array:
        """`X X^H`."""
        if x.shape[-2] < 2 * self.block_rows:
            return round_to(self.matmul(x, adjoint(x)), self.dtype)
        # No slice is transposed: a copy of X costs a CPU as much as the arithmetic.
        top, bottom = _halves(x)
        left, right = (self.matmul(bottom, adjoint(z)) for z in (top, bottom))
        rows = jnp.concatenate([left, right], axis=-1)
        return round_to(_mirrored(self.matmul(top, adjoint(top)), rows), self.dtype)

    def commuting(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """`P Q`, which is Hermitian where both are and commute; not rounded."""
        if p.shape[-2] < 2 * self.block_rows:
            return self.matmul(p, q)
        top, bottom = _halves(p)
        corner = self.matmul(top, q[..., : top.shape[-2]])
        return _mirrored(corner, self.matmul(bottom, q))


def iterate(x: jax.Array, passes: Passes, products: Products) -> jax.Array:
    """All steps; the last product is not rounded to the dtype of the iteration."""
    is_tall = x.shape[-2] > x.shape[-1]
    for steps in passes:
        x = round_to(x, products.dtype)
        q, keep = _factor(products.gram(adjoint(x) if is_tall else x), steps, products)
        # From the right: to turn a tall matrix would be a copy of it in float32.
        y = products.matmul(x, q) if is_tall else products.matmul(q, x)
        x = y + keep * x.astype(y.dtype)
    return x


def _factor(
    r: jax.Array, steps: Schedule, products: Products
) -> tuple[jax.Array, float | jax.Array]:
    """The product of the steps' polynomials of R, as `Q + keep I`.

    The mean of the diagonal is kept apart, in float32: Q rounds what is left, and the
    error of bfloat16 is half of what it would be with the whole diagonal in it.
    """
    q, keep = None, 1.0
    for i, (a, b, c) in enumerate(steps):
        z = _rounded(
            c * products.commuting(r, r) + b * _wide(r) if c else b * _wide(r), r
        )
        if q is None:
            q, keep = z, a
        else:
            # (Q + keep I)(Z + a I)
            total = products.commuting(q, z) + a * _wide(q) + keep * _wide(z)
            mean = jnp.trace(total, axis1=-2, axis2=-1)[..., None, None] / r.shape[-1]
            one = jnp.eye(r.shape[-1], dtype=total.dtype)
            q, keep = _rounded(total - mean * one, r), keep * a + mean
        if i < len(steps) - 1:
            # R of the next step is (Z + a I) R (Z + a I).
            rz = _rounded(products.commuting(r, z) + a * _wide(r), r)
            r = _rounded(products.commuting(z, rz) + a * _wide(rz), r)
    assert q is not None
    return q, keep


def _rounded(x: jax.Array, like: jax.Array) -> jax.Array:
    return round_to(x, like.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(np.promote_types(x.dtype, jnp.float32))


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds for good, and once.

    A compiler may drop a conversion there and back, so that a sum would see the R
    before and a product the R after; the Gram form does not survive that.
    """
    return x if x.dtype == dtype else jax.lax.optimization_barrier(x.astype(dtype))


def adjoint(x: jax.Array) -> jax.Array:
    return x.mT.conj() if jnp.iscomplexobj(x) else x.mT


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = x.shape[-2] // 2
    return x[..., :half, :], x[..., half:, :]


def _mirrored(corner: jax.Array, below: jax.Array) -> jax.Array:
    """A Hermitian matrix of its first block and the rows below that."""
    mirror = adjoint(below[..., : corner.shape[-1]])
    above = jnp.concatenate([corner, mirror], axis=-1)
    return jnp.concatenate([above, below], axis=-2)

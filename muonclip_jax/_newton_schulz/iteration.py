"""Newton-Schulz's iteration: singular values into [0, 1], and from there near 1.

A step multiplies X by `a I + b R + c R^2`, with `R = X X^H`. A pass collects steps on R
and multiplies X once. The standard form has one step a pass. The Gram form has as many
as rounding allows: R, the square of X, loses more to it than X.

Arrays are `(..., m, n)`. A matrix with more rows than columns is iterated from the
other side. Factors are rounded to the dtype of the iteration; products accumulate in
float32 or wider, and coefficients are as wide. In float16 on GPU products have sums in
them instead (`sums_in_products.py`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .coefficients import Schedule


Passes = tuple[Schedule, ...]
Preconditioning = Literal["frobenius", "aol", "equilibrated"]

#: Rows and columns with less than this share of the mean square are not lifted to the
#: rest: entries of a thousandth in size may be rounding errors.
NOISE = 1e-6


#: How much the steps of a pass may lift the rounding error of R: the product of the
#: squares of all slopes but the last.
#: In bfloat16 it is just above the square of Keller Jordan's slope, 3.4445**2 = 11.9,
#: so that a pass has two of his steps. With steeper ones the error would be more than
#: twice that of the standard form (tests/newton_schulz/test_accuracy.py).
#: In float16 a pass has two steps of every preset; the first step of an optimal one,
#: 8.2**2 = 67, stands alone. In float32 it has three of Keller Jordan's, 3.4445**4 =
#: 141.
MOST_GROWTH = {"bfloat16": 14.0, "float16": 40.0}
USUAL_GROWTH = 150.0


def precondition(
    parts: Sequence[jax.Array], kind: Preconditioning, by_rows: bool = False
) -> jax.Array:
    """Scales `(..., m, n)` in float32 or wider, and joins the parts of a stack.

    Norms are taken of the parts, so that a GPU writes the stack once, scaled, and does
    not read it again. `by_rows`: sums of rows are one kernel a part, with what made it,
    and the sums of these are one kernel for all parts.
    """
    y = _divide_by_norm(
        by_rows,
        tuple(x.astype(np.promote_types(x.dtype, jnp.float32)) for x in parts),
    )
    if kind == "frobenius":
        return y
    wide = y.mT if y.shape[-2] > y.shape[-1] else y
    if kind == "equilibrated":
        # n columns of norm 1 may have a singular value of sqrt(n).
        wide = _divide_by_norm(by_rows, (_equilibrated(wide),))
    else:
        wide = _almost_orthogonal(wide)
    return wide.mT if y.shape[-2] > y.shape[-1] else wide


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _divide_by_norm(by_rows: bool, parts: tuple[jax.Array, ...]) -> jax.Array:
    x, factor, norm = _with_norms(parts, by_rows)
    y = x * factor
    # The norm is 0 where all of y is. A condition on it would be one more kernel for
    # every leaf on GPU.
    return jnp.where(y == 0, y, y / norm)


@_divide_by_norm.defjvp
def _divide_by_norm_jvp(by_rows, primals, tangents):
    # d(x / |x|) = (dx - y <y, dx>) / |x|, with y = x / |x|. JAX's own rules would
    # multiply 0 by infinity in the sums that do not count. A zero matrix has no
    # derivative; this gives it one of 0.
    ((parts,), (dparts,)) = primals, tangents
    (x, factor, norm), dx = _with_norms(parts, by_rows), jnp.concatenate(dparts)
    y = x * factor / jnp.where(norm > 0, norm, 1)
    dy = dx * factor / jnp.where(norm > 0, norm, jnp.inf)
    along = jnp.sum(jnp.real(y.conj() * dy), axis=(-2, -1), keepdims=True)
    return y, dy - y * along


def _with_norms(
    parts: Sequence[jax.Array], by_rows: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the stack of some parts, with a factor and the norm of each matrix."""
    if by_rows:
        sums = [*map(jnp.concatenate, zip(*map(_squares_of_rows, parts), strict=True))]
        return jnp.concatenate(parts), *_norms(_powers(sums[0].dtype), *sums)
    factors, norms = zip(*map(_norms_of, parts), strict=True)
    return jnp.concatenate(parts), jnp.concatenate(factors), jnp.concatenate(norms)


# These two are compiled, so that equal leaves are traced once.
@jax.jit
def _norms_of(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    powers = _powers(jnp.finfo(x.dtype).dtype)
    return _norms(powers, *_squares(powers, x, (-2, -1)))


@jax.jit
def _squares_of_rows(x: jax.Array) -> list[jax.Array]:
    return _squares(_powers(jnp.finfo(x.dtype).dtype), x, (-1,))


#: A factor that shrinks, one that enlarges, and the largest sum that has lost nothing.
Powers = tuple[jax.Array, jax.Array, float]


def _squares(powers: Powers, x: jax.Array, axes: tuple[int, ...]) -> list[jax.Array]:
    """Returns sums of squares of the numbers, of them enlarged and of them shrunk.

    The square of 1e-30 or of 1e30 leaves float32. The sum that stayed in range counts.
    """
    shrink, enlarge, _ = powers
    return [
        jnp.sum(jnp.real(y * y.conj()), axis=axes, keepdims=True)
        for y in (x, x * enlarge, x * shrink)
    ]


def _norms(
    powers: Powers, total: jax.Array, small: jax.Array, large: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns powers of two, and the Frobenius norms times these, `(..., 1, 1)`."""
    shrink, enlarge, most = powers
    if total.shape[-2] > 1:
        total, small, large = (
            jnp.sum(x, axis=-2, keepdims=True) for x in (total, small, large)
        )
    is_large, is_small = total > most, total < 1 / most
    factor = jnp.where(is_large, shrink, jnp.where(is_small, enlarge, 1))
    counts = jnp.where(is_large, large, jnp.where(is_small, small, total))
    return factor, jnp.sqrt(counts)


def _powers(dtype: jnp.dtype) -> Powers:
    # 5/8 of the exponents: 2^80 in float32. A sum between 2^-80 and 2^80 has lost
    # nothing. Smaller numbers, down to 2^-126, times 2^80 have squares in range: 2^-92.
    most = 2.0 ** (5 * jnp.finfo(dtype).maxexp // 8)
    # A compiler that knew the factors might square them first.
    shrink, enlarge = jax.lax.optimization_barrier(
        (jnp.asarray(1 / most, dtype), jnp.asarray(most, dtype))
    )
    return shrink, enlarge, most


def _almost_orthogonal(x: jax.Array) -> jax.Array:
    """Divides row `i` by the root of the sum over `j` of `|X X^H|_ij`.

    No singular value then exceeds 1 (Prach and Lampert, arXiv:2208.03160, Theorem 1).
    """
    sums = jnp.sum(jnp.abs(x @ x.mT.conj()), axis=-1, keepdims=True)
    # The inner `where` is for derivatives: where the sum is 0, the outer one multiplies
    # by 0, and without the inner one the other factor would be infinite.
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


def collected(schedule: Schedule, dtype: str) -> Passes:
    """Collects steps into as few passes as rounding allows, from the last step back.

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
    """Returns the multiplications for a matrix of `(m, n)`, the short side first."""
    # A pass needs m^2 n for R, and again to apply the result. A step needs m^3 for R^2
    # if it has a c, and each but the first of a pass 3 m^3 for R Z, Z R Z and Q Z.
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
    is_rolled: bool = False  # equal passes are a loop

    def matmul(self, x: jax.Array, y: jax.Array) -> jax.Array:
        wide = np.promote_types(x.dtype, jnp.float32)
        return jnp.matmul(x, y, precision=self.precision, preferred_element_type=wide)

    def gram(self, x: jax.Array) -> jax.Array:
        """Returns `X X^H`."""
        h = x.mT.conj()
        if x.shape[-2] < 2 * self.block_rows:
            return round_to(self.matmul(x, h), self.dtype)
        # No slice is transposed: a copy of X costs a CPU as much as the arithmetic.
        top, bottom = _halves(x)
        corner, below = self.matmul(top, top.mT.conj()), self.matmul(bottom, h)
        return round_to(_mirrored(corner, below), self.dtype)

    def commuting(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """Returns `P Q` of Hermitian matrices that commute, not rounded."""
        if p.shape[-2] < 2 * self.block_rows:
            return self.matmul(p, q)
        top, bottom = _halves(p)
        corner = self.matmul(top, q[..., : top.shape[-2]])
        return _mirrored(corner, self.matmul(bottom, q))


def iterate(x: jax.Array, passes: Passes, products: Products) -> jax.Array:
    """Runs all steps; the last product is not rounded to the iteration's dtype."""
    if not (products.is_rolled and len(passes) > 1 == len({*passes})):
        for steps in passes:
            x = _after(steps, products, x)
        return x
    wide = np.promote_types(x.dtype, jnp.float32)
    step = functools.partial(_after, passes[0], products)
    return jax.lax.fori_loop(0, len(passes), lambda _, x: step(x), x.astype(wide))


# Compiled, so that passes which are equal are traced once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _after(steps: Schedule, products: Products, x: jax.Array) -> jax.Array:
    """Returns X after the steps of a pass."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = round_to(x, products.dtype)
    q, keep = _factor(products.gram(x.mT.conj() if is_tall else x), steps, products)
    # From the right: to turn a tall matrix would be a copy of it in float32.
    y = products.matmul(x, q) if is_tall else products.matmul(q, x)
    return y + keep * x.astype(y.dtype)


def _factor(
    r: jax.Array, steps: Schedule, products: Products
) -> tuple[jax.Array, float | jax.Array]:
    """Returns the product of the steps' polynomials of R, as `Q + keep I`.

    The mean of the diagonal is kept apart, in float32: Q rounds what is left, and the
    error of bfloat16 is half of what it would be with the whole diagonal in it.
    """
    dtype, wide = r.dtype, np.promote_types(r.dtype, jnp.float32)
    q, keep = None, 1.0
    for i, (a, b, c) in enumerate(steps):
        z = b * r.astype(wide)
        if c:
            z = c * products.commuting(r, r) + z
        z = round_to(z, dtype)
        if q is None:
            q, keep = z, a
        else:
            # (Q + keep I)(Z + a I)
            total = (
                products.commuting(q, z) + a * q.astype(wide) + keep * z.astype(wide)
            )
            mean = jnp.trace(total, axis1=-2, axis2=-1)[..., None, None] / r.shape[-1]
            one = jnp.eye(r.shape[-1], dtype=wide)[(None,) * (r.ndim - 2)]
            q, keep = round_to(total - mean * one, dtype), keep * a + mean
        if i < len(steps) - 1:
            # R of the next step is (Z + a I) R (Z + a I).
            rz = round_to(products.commuting(r, z) + a * r.astype(wide), dtype)
            r = round_to(products.commuting(z, rz) + a * rz.astype(wide), dtype)
    assert q is not None
    return q, keep


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds once, where no compiler can undo it.

    A compiler may drop a conversion there and back, so that a sum has an R that is not
    rounded and a product one that is; the Gram form does not survive that.
    """
    return x if x.dtype == dtype else jax.lax.optimization_barrier(x.astype(dtype))


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = x.shape[-2] // 2
    return x[..., :half, :], x[..., half:, :]


def _mirrored(corner: jax.Array, below: jax.Array) -> jax.Array:
    """Returns a Hermitian matrix from its first block and the rows below that."""
    # A sum, since XLA for CPU compiles each concatenation by itself, and equal sums
    # once, with the arithmetic around them.
    half, rows = corner.shape[-1], below.shape[-2]
    zero, stack = jnp.zeros((), below.dtype), [(0, 0, 0)] * (below.ndim - 2)
    first, last = (0, rows, 0), (half, 0, 0)
    mirror = below[..., :half].mT.conj()
    return (
        jax.lax.pad(corner, zero, [*stack, first, first])
        + jax.lax.pad(mirror, zero, [*stack, first, last])
        + jax.lax.pad(below, zero, [*stack, last, (0, 0, 0)])
    )

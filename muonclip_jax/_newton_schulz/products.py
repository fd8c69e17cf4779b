"""The products of the iteration: what is known to be Hermitian, and what is not.

All act on `(..., m, n)`. Whatever enters a product has been rounded to the dtype of the
iteration; products accumulate in float32 or wider, and coefficients are float32 or
wider. A matrix with more rows than columns is iterated as it is, from the other side:
`X^H X` for `X X^H`, and `X P` for `P X`.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


class Products(Protocol):
    """Products of one dtype on one platform."""

    #: Whether a library adds to a product before it stores that, in `dtype`: a sum
    #: without a coefficient on the product is then free, and any other costs a pass
    #: over memory.
    adds_for_free: bool

    def gram(self, x: jax.Array) -> jax.Array:
        """`X X^H`, or `X^H X` of a tall one, rounded to the dtype of the iteration."""
        ...

    def multiply(
        self,
        p: jax.Array,
        q: jax.Array,
        addend: jax.Array,
        *,
        scale: ArrayLike = 1.0,
        keep: ArrayLike = 1.0,
        rounded: bool = True,
        wide: bool = False,
    ) -> jax.Array:
        """`scale P Q + keep addend`, all Hermitian, for P and Q that commute.

        - `scale`, `keep`: numbers, or `(..., 1, 1)`.
        - `rounded`: whether to the dtype of the iteration.
        - `wide`: whether the product must not be rounded before the sum.
        """
        ...

    def apply(self, p: jax.Array, x: jax.Array, keep: ArrayLike) -> jax.Array:
        """`P X + keep X`, not rounded; `X P + keep X` of a tall X."""
        ...


class XlaProducts:
    """Products by XLA and its libraries."""

    def __init__(
        self,
        dtype: jnp.dtype,
        *,
        exact: bool = False,
        adds_for_free: bool = False,
        block_rows: float = np.inf,
    ):
        """`exact` keeps all bits of float32, of which accelerators would drop some.

        From two blocks of `block_rows` on, Hermitian products are made of two: that
        above the diagonal is mirrored, which leaves 3/4 of the arithmetic.
        """
        self.dtype, self.adds_for_free = dtype, adds_for_free
        self.precision = jax.lax.Precision.HIGHEST if exact else None
        self.block_rows = block_rows
        self.sums = dtype if adds_for_free else np.promote_types(dtype, jnp.float32)

    def gram(self, x):
        wide = adjoint(x) if is_tall(x) else x
        if wide.shape[-2] < 2 * self.block_rows:
            r = self._matmul(wide, adjoint(wide))
        else:
            # Of two blocks of rows, three products of a block, no slice of which is
            # transposed: a copy of X costs a CPU as much as the arithmetic saved.
            top, bottom = _halves(wide)
            on_diagonal = self._matmul(top, adjoint(top))
            left, right = (self._matmul(bottom, adjoint(x)) for x in (top, bottom))
            r = _mirrored(on_diagonal, jnp.concatenate([left, right], axis=-1))
        return round_to(r, self.dtype)

    def multiply(
        self,
        p,
        q,
        addend,
        *,
        scale: ArrayLike = 1.0,
        keep: ArrayLike = 1.0,
        rounded=True,
        wide=False,
    ):
        matmul = functools.partial(self._matmul, sums=jnp.float32 if wide else None)
        if p.shape[-2] < 2 * self.block_rows:
            product = matmul(p, q)
        else:
            top, bottom = _halves(p)
            columns = q[..., : top.shape[-2]]
            product = _mirrored(matmul(top, columns), matmul(bottom, q))
        is_free = isinstance(scale, float) and scale == 1.0
        sums = self.sums if is_free else jnp.float32
        total = add(product, addend, scale, keep, sums)
        return round_to(total, self.dtype) if rounded else total

    def apply(self, p, x, keep):
        product = self._matmul(x, p) if is_tall(x) else self._matmul(p, x)
        return add(product, x, 1.0, keep, self.sums)

    def _matmul(self, x, y, sums: DTypeLike | None = None):
        accumulator = np.promote_types(x.dtype, sums or self.sums)
        return jnp.matmul(
            x, y, precision=self.precision, preferred_element_type=accumulator
        )


class KernelProducts(XlaProducts):
    """Hermitian products by a kernel of this package, all others by XLA.

    A kernel takes stacks x and y, and returns `scale x y^T + shift addend`.
    """

    def __init__(
        self,
        kernel: Callable[..., jax.Array],
        dtype: jnp.dtype,
        *,
        adds_for_free: bool = False,
    ):
        super().__init__(dtype, adds_for_free=adds_for_free)
        self.kernel = kernel

    def gram(self, x):
        x = adjoint(x) if is_tall(x) else x
        return self._call(x, x)

    def multiply(
        self,
        p,
        q,
        addend,
        *,
        scale: ArrayLike = 1.0,
        keep: ArrayLike = 1.0,
        rounded=True,
        wide=False,
    ):
        del wide  # the kernels sum in float32 in any case, and round once
        options: dict[str, Any] = dict(
            addend=_as_stack(addend), scale=_of_each(scale), shift=_of_each(keep)
        )
        if not rounded and not self.adds_for_free:
            options["out_dtype"] = jnp.float32
        return self._call(p, q, **options)

    def _call(self, x, y, **options):
        left = _as_stack(x)
        # One array that comes twice is read once.
        out = self.kernel(left, left if x is y else _as_stack(y), **options)
        return out.reshape(*x.shape[:-1], x.shape[-2])


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = x.shape[-2] // 2
    return x[..., :half, :], x[..., half:, :]


def _mirrored(on_diagonal: jax.Array, below: jax.Array) -> jax.Array:
    """A Hermitian matrix of its first block and the rows below that."""
    mirror = adjoint(below[..., : on_diagonal.shape[-1]])
    above = jnp.concatenate([on_diagonal, mirror], axis=-1)
    return jnp.concatenate([above, below], axis=-2)


def add(x, y, a: ArrayLike, b: ArrayLike, dtype: DTypeLike = jnp.float32):
    """`a x + b y` in `dtype` or wider."""
    sums = np.promote_types(x.dtype, dtype)
    return a * x.astype(sums) + b * y.astype(sums)


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds for good, and once.

    A compiler may drop a conversion there and back, so that a sum would see the R
    before and a product the R after; the Gram form does not survive that. Or it may
    convert anew for every tile of a product, which costs more than the product.
    """
    if x.dtype == dtype:
        return x
    return jax.lax.optimization_barrier(x.astype(dtype))


def widen(x: jax.Array) -> jax.Array:
    """In float32 or wider."""
    return x.astype(np.promote_types(x.dtype, jnp.float32))


def is_tall(x: jax.Array) -> bool:
    return x.shape[-2] > x.shape[-1]


def adjoint(x: jax.Array) -> jax.Array:
    return x.mT.conj() if jnp.iscomplexobj(x) else x.mT


def _as_stack(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[-2:])


def _of_each(number: ArrayLike) -> ArrayLike:
    """A number, or one for each matrix of a stack."""
    return number.reshape(-1) if isinstance(number, jax.Array) else number

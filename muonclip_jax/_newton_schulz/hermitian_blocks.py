"""Hermitian matrices as the blocks on and below their diagonal.

What lies above is known, so a product of two that commute, or of a matrix with its own
adjoint, computes `(k + 1) / 2k` of the arithmetic for `k` rows of blocks. One block is
the whole matrix. Functions return trees of blocks: sums are `jax.tree.map`.
"""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


#: A wide matrix, cut along its rows, or a tall one, cut along its columns.
Rows = tuple[jax.Array, ...]
Hermitian = tuple[Rows, ...]  # the blocks [i][j] with j <= i
Matmul = Callable[[jax.Array, jax.Array], jax.Array]


def split(x: jax.Array, blocks: int) -> Rows:
    """Without a batch axis of one, with which a product is slower."""
    x = x[0] if x.ndim == 3 and len(x) == 1 else x
    return tuple(jnp.array_split(x, blocks, axis=_cut(x))) if blocks > 1 else (x,)


def join(rows: Rows) -> jax.Array:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=_cut(rows[0]))


def is_tall(x: jax.Array) -> bool:
    return x.shape[-2] > x.shape[-1]


def gram_matrix(matmul: Matmul, x: Rows) -> Hermitian:
    """`X X^H`, or `X^H X` of a tall one."""

    def entry(i, j):
        if is_tall(x[0]):
            return matmul(_adjoint(x[i]), x[j])
        return matmul(x[i], _adjoint(x[j]))

    return _lower(len(x), entry)


def multiply(matmul: Matmul, p: Hermitian, q: Hermitian) -> Hermitian:
    """`P Q`, for `P` and `Q` that commute."""
    return _lower(
        len(p),
        lambda i, j: _sum(
            matmul(_block(p, i, k), _block(q, k, j)) for k in range(len(p))
        ),
    )


def apply(matmul: Matmul, p: Hermitian, x: Rows) -> Rows:
    """`P X`, or `X P` of a tall one."""

    def term(i, k):
        if is_tall(x[0]):
            return matmul(x[k], _block(p, k, i))
        return matmul(_block(p, i, k), x[k])

    return tuple(_sum(term(i, k) for k in range(len(x))) for i in range(len(x)))


def add_to_diagonal(p: Hermitian, a: jax.Array) -> Hermitian:
    """`P + a I`, with `a` of shape `(..., 1, 1)`."""

    def add(i, j):
        block = p[i][j]
        one = jnp.eye(block.shape[-1], dtype=block.dtype)
        return block + a * jnp.broadcast_to(one, block.shape) if i == j else block

    return _lower(len(p), add)


def mean_diagonal(
    p: Hermitian, diagonal: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The mean of the diagonal, in float32 or better, as `(..., 1, 1)`."""
    diagonals = [diagonal(p[i][i]) for i in range(len(p))]
    accumulator = np.promote_types(diagonals[0].dtype, jnp.float32)
    total = _sum(x.astype(accumulator).sum(axis=-1) for x in diagonals)
    return total[..., None, None] / sum(x.shape[-1] for x in diagonals)


def _lower(blocks: int, entry: Callable[[int, int], jax.Array]) -> Hermitian:
    return tuple(tuple(entry(i, j) for j in range(i + 1)) for i in range(blocks))


def _cut(x: jax.Array) -> int:
    return -1 if is_tall(x) else -2


def _block(p: Hermitian, i: int, j: int) -> jax.Array:
    return p[i][j] if j <= i else _adjoint(p[j][i])


def _sum(terms) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _adjoint(x: jax.Array) -> jax.Array:
    return x.mT.conj() if jnp.iscomplexobj(x) else x.mT

"""Leaves become stacks of matrices, are orthogonalized, and become leaves again."""

from collections.abc import Callable, Sequence

import jax

from ._buckets import plan_buckets
from ._matrices import MatrixView


def orthogonalize(
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView | None],
    iterate: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    """Applies `iterate`, `(count, m, n)` to the same, to every leaf that has a view.

    Matrices of one shape share one call, whichever leaves they come from, so that the
    program grows with the number of shapes and not with that of leaves.
    """
    return plan_buckets(leaves, views).apply(iterate, leaves)

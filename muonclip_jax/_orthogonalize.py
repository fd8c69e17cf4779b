"""Leaves become stacks of matrices, are orthogonalized, and become leaves again."""

from collections.abc import Callable, Sequence

import jax

from ._matrices import MatrixView


def orthogonalize(
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView | None],
    iterate: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    """Applies `iterate`, `(count, m, n)` to the same, to every leaf that has a view."""
    return [
        leaf if view is None else view.from_matrices(iterate(view.to_matrices(leaf)))
        for leaf, view in zip(leaves, views, strict=True)
    ]

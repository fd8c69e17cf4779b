"""What a trace reads of a tree of leaves, once: paths, matrices, shardings."""

from typing import Any, NamedTuple

from .._matrices.view import MatrixView
from .._mesh.layouts import Layouts
from .._parameters import paths
from .._parameters.dimension_numbers import DimensionNumbers, matrix_views


class Leaves(NamedTuple):
    """The leaves of a tree, and for each what is known of it."""

    tree: paths.PathedTree
    views: list[MatrixView | None]  # None where it is hidden or holds no matrix
    shardings: list[Any]  # None where the user gave none
    layouts: Layouts


def read_leaves(
    tree: Any,
    dimension_numbers: DimensionNumbers | None,
    layouts: Layouts,
) -> Leaves:
    leaves = paths.flatten(tree)
    return Leaves(
        leaves,
        matrix_views(dimension_numbers, leaves),
        layouts.given(leaves),
        layouts,
    )

"""What a trace reads of a tree of leaves, once: paths, matrices, shardings."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._matrices.view import MatrixView
from .._mesh.cuts import Cuts, cuts_here, with_whole_leaves
from .._mesh.layouts import Layouts
from .._mesh.placement import Placement
from .._mesh.replicas import Axes, mean_over_replicas
from .._parameters import paths
from .._parameters.dimension_numbers import DimensionNumbers, matrix_views
from .._parameters.verdicts import are_output_heads


_NO_HEAD = (
    "head_learning_rate was given, but no leaf that goes to AdamW is found to be an "
    "output head; print(mc.describe(params)) shows why. Where the embedding writes the "
    "output too, leave it out: head_learning_rate=None. A head that is not found gets "
    "a rate of its own by optax.partition around mc.muon and optax.adamw"
)


#: Where the arguments of an update are in another order, too.
NO_STATE = (
    "the state is not one that init of {} made: tx.update(grads, state, params), with "
    "the state of the last update, or of tx.init(params)"
)


class Leaves(NamedTuple):
    """The leaves of a tree, and for each what is known of it."""

    tree: paths.PathedTree
    views: list[MatrixView | None]  # None where it is hidden or holds no matrix
    shardings: list[Any]  # None where the user gave none
    layouts: Layouts
    cuts: Cuts  # inside `jax.shard_map`, where views are those of the whole leaves

    def mean_over(self, axes: Axes, gradients: Any) -> Any:
        """The gradients, as a tree, averaged over replicas."""
        if not axes:
            return gradients
        leaves = mean_over_replicas(self.tree.of(gradients), self.cuts, axes)
        return self.tree.unflatten(leaves)

    def check_like(self, name: str, other: Any) -> None:
        """Raises where what belongs to the gradients, read here, is of other leaves."""
        if other is None:
            return
        try:
            theirs = self.tree.of(other)
        except (TypeError, ValueError):
            known = set(paths.flatten(other).paths), set(self.tree.paths)
            lacking = sorted(known[0] - known[1]), sorted(known[1] - known[0])
            which = [
                f"the gradients lack {paths.show_all(x)}" for x in lacking[:1] if x
            ]
            which += [f"the {name} lack {paths.show_all(x)}" for x in lacking[1:] if x]
            raise ValueError(
                f"gradients and {name} have different structures: "
                + ("; ".join(which) or "their containers differ")
            ) from None
        for path, own, leaf in zip(*self.tree[:2], theirs, strict=True):
            if paths.is_masked(own) or paths.is_masked(leaf):
                continue
            if np.shape(own) != np.shape(leaf):
                raise ValueError(
                    f"the gradient of '{paths.show(path)}' has shape {np.shape(own)}, "
                    f"but in the {name} it is {np.shape(leaf)}"
                )

    def output_heads(self) -> list[bool]:
        """Whether each leaf is an output head, and no matrix.

        **Raises:** `ValueError` where there is none.
        """
        found = are_output_heads(with_whole_leaves(self.tree, self.cuts))
        heads = [
            is_head and view is None
            for is_head, view in zip(found, self.views, strict=True)
        ]
        if not any(heads):
            raise ValueError(_NO_HEAD)
        return heads

    def placement(self, arrays: Sequence[Any]) -> Placement | None:
        """Where arrays in the place of the leaves lie, as far as it is known."""
        return self.layouts.placement(self.tree.paths, arrays, self.shardings)


def read_leaves(
    tree: Any,
    dimension_numbers: DimensionNumbers | None,
    layouts: Layouts,
    *,
    per_head: bool = False,
) -> Leaves:
    leaves = paths.flatten(tree)
    given = layouts.given(leaves)
    cuts = cuts_here(leaves, given)
    whole = with_whole_leaves(leaves, cuts)
    return Leaves(
        leaves,
        matrix_views(dimension_numbers, whole, per_head=per_head),
        given,
        layouts,
        cuts,
    )


def check_matrices_only(leaves: Leaves, name: str) -> None:
    """Raises for leaves in sight that hold no matrix."""
    strays = [
        path
        for path, leaf, view in zip(*leaves.tree[:2], leaves.views, strict=True)
        if view is None and not paths.is_masked(leaf)
    ]
    if strays:
        raise ValueError(
            f"{name} was handed leaves that hold no matrix: "
            f"{paths.show_all(strays)}. Wrap it as optax.masked(mc.{name}(), "
            "mc.matrix_mask), use mc.muon, or name their axes in dimension_numbers"
        )

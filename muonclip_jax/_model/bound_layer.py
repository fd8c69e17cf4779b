"""An attention layer bound to its leaves: its heads, and who shares them."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._parameters.paths import Path, show, show_module, split
from .attention_layers import AttentionLayer, READ_IT, ROLES
from .owned_leaf import OwnedLeaf


class Use(NamedTuple):
    """A leaf in one of its roles in a layer."""

    layer: "BoundLayer"
    path: Path
    leaf: OwnedLeaf
    row: tuple[int, ...]  # (*stack, heads) as the leaf has them
    role: str

    @property
    def is_whole(self) -> bool:
        """Whether every head of every layer of the stack has entries of its own."""
        return self.row == self.layer.shape

    def meets(self, other: "Use") -> bool:
        """Whether both have some entry of one leaf."""
        return self.path == other.path and not self.leaf.is_apart_from(other.leaf)

    def first_heads(self) -> np.ndarray:
        """For every head of the layer the first of those that share its entries.

        They are numbered in the row of all layers; those that share a key are in a run.
        """
        shape, depth = self.layer.shape, len(self.row) - 1
        group = max(1, shape[-1] // max(1, self.row[-1]))
        heads = np.arange(math.prod(shape)).reshape(shape)
        heads = heads[..., np.arange(shape[-1]) // group * group] + self.layer.start
        # What has fewer axes all layers along the others share.
        axes = (slice(None),) * depth + (slice(0, 1),) * (len(shape) - 1 - depth)
        return np.broadcast_to(heads[axes], shape)

    def row_of(self, row: jax.Array) -> jax.Array:
        """The values of the first of heads that share entries, `(*stack, heads)`."""
        if self.is_whole:
            return row
        at = np.unique(self.first_heads()) - self.layer.start
        return row.ravel()[at].reshape(self.row)


class BoundLayer:
    """The heads of a layer as they can be scaled, and its leaves.

    Shapes are those of the whole leaves, which mapped axes may cut: whether query heads
    share a key shows in the whole layer alone.

    **Raises:** `ValueError`, naming the leaves, where their heads do not fit together.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        leaf_at: Mapping[Path, Any],
        index: int,
        start: int,
    ):
        self.path = split(layer.path)
        self.threshold = layer.threshold
        # Among all layers, and of its first head in the row of all heads.
        self.index, self.start = index, start
        own = map(layer.path_of, layer.leaves)
        shapes = {path: tuple(leaf_at[path].shape) for path in own}
        self.leaves = ", ".join(f"'{show(path)}' {x}" for path, x in shapes.items())
        self.uses: list[Use] = []
        for role in ROLES:
            for given in getattr(layer, role):
                path = layer.path_of(given)
                if leaf := given.owned(shapes[path]):
                    stack = (shapes[path][axis] for axis in leaf.stack)
                    row = (*stack, leaf.heads)
                    self.uses.append(Use(self, path, leaf, row, role))
        #: `(*stack, heads)` of the layer. Leaves may have less: those that several
        #: heads share, or all layers of the stack.
        self.shape: tuple[int, ...] = (
            *max((use.row[:-1] for use in self.uses), key=len, default=()),
            max((use.row[-1] for use in self.uses), default=0),
        )
        if len(self.uses) < len(layer.leaves) or not all(map(self._fits, self.uses)):
            # Flax kernels are named, since another layout (features last, say) is the
            # likely cause: the numbers of heads then disagree.
            raise ValueError(
                f"the heads of attention layer '{show_module(self.path)}' do not fit "
                f"together: {self.leaves}. Expected Flax kernels (*stack, features, "
                "heads, head_dim) with key heads that divide the query's. For other "
                f"layouts use {READ_IT}, or describe them in attention="
            )
        # A query that all heads share does not say how many there are. Where the
        # statistic has others than the key, they are clipped together.
        of_query = [use.leaf for use in self.uses if use.role != "key"]
        self.is_shared = all(leaf.is_of_all for leaf in of_query)

    def _fits(self, use: Use) -> bool:
        heads, own = self.shape[-1], use.row[-1]
        is_part = self.shape[: len(use.row) - 1] == use.row[:-1]
        # Keys may be shared by groups of query heads, and any leaf by all heads.
        is_count = use.role == "key" or own in (1, heads)
        return is_part and is_count and (heads % own == 0 if own else not heads)

"""An attention layer bound to its leaves: which heads it has, and which share them."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._parameters.paths import Path, show, show_module, split
from .attention_layers import AttentionLayer, READ_IT, ROLES
from .owned_leaf import OwnedLeaf


class LeafInRole(NamedTuple):
    """A leaf of a layer in one role."""

    layer: "BoundLayer"
    path: Path
    leaf: OwnedLeaf
    row_shape: tuple[int, ...]  # (*stack, heads) of the leaf
    role: str

    @property
    def is_whole(self) -> bool:
        """Whether every head of every layer of the stack has entries of its own."""
        return self.row_shape == self.layer.shape

    def meets(self, other: "LeafInRole") -> bool:
        """Whether both use some entry of the same leaf."""
        return self.path == other.path and not self.leaf.is_apart_from(other.leaf)

    def first_heads(self) -> np.ndarray:
        """Returns, for each head of the layer, the first head that shares its entries.

        Heads are numbered in the row of all layers. Heads with one key are in a run.
        """
        shape, depth = self.layer.shape, len(self.row_shape) - 1
        group = max(1, shape[-1] // max(1, self.row_shape[-1]))
        heads = np.arange(math.prod(shape)).reshape(shape)
        heads = heads[..., np.arange(shape[-1]) // group * group] + self.layer.start
        # All layers along the axes that the leaf lacks share it.
        axes = (slice(None),) * depth + (slice(0, 1),) * (len(shape) - 1 - depth)
        return np.broadcast_to(heads[axes], shape)

    def row_of(self, row: jax.Array) -> jax.Array:
        """Returns a value per group of heads that share entries, `(*stack, heads)`."""
        if self.is_whole:
            return row
        firsts = np.unique(self.first_heads()) - self.layer.start
        return row.ravel()[firsts].reshape(self.row_shape)


class BoundLayer:
    """The leaves of a layer and the heads that they scale.

    Shapes are global, although mapped axes may cut the leaves: only the whole layer
    shows whether query heads share a key.

    A layer that nothing scales has no leaves, and the `shape` that was read.

    **Raises:** `ValueError`, naming the leaves, if their heads do not fit together.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        leaf_at: Mapping[Path, Any],
        index: int,
        start: int,
        shape: tuple[int, ...] = (0,),
    ):
        self.path = split(layer.path)
        self.threshold = layer.threshold
        # The number of the layer, and of its first head in the row of all heads.
        self.index, self.start = index, start
        leaf_paths = map(layer.path_of, layer.leaves)
        shapes = {path: tuple(leaf_at[path].shape) for path in leaf_paths}
        self.leaves = ", ".join(f"'{show(path)}' {x}" for path, x in shapes.items())
        self.uses: list[LeafInRole] = []
        for role in ROLES:
            for described in getattr(layer, role):
                path = layer.path_of(described)
                if leaf := described.owned(shapes[path]):
                    stack = (shapes[path][axis] for axis in leaf.stack)
                    row = (*stack, leaf.heads)
                    self.uses.append(LeafInRole(self, path, leaf, row, role))
        #: `(*stack, heads)` of the layer. A leaf may have fewer, if several heads or
        #: all layers of the stack share it.
        self.shape: tuple[int, ...] = shape
        if self.uses:
            stack = max((use.row_shape[:-1] for use in self.uses), key=len)
            self.shape = (*stack, max(use.row_shape[-1] for use in self.uses))
        if len(self.uses) < len(layer.leaves) or not all(map(self._fits, self.uses)):
            # The error names Flax's layout, because another layout (such as features
            # last) is the likely cause: the numbers of heads then disagree.
            raise ValueError(
                f"the heads of attention layer '{show_module(self.path)}' do not fit "
                f"together: {self.leaves}. Expected Flax kernels (*stack, features, "
                "heads, head_dim) with key heads that divide the query's. For other "
                f"layouts use {READ_IT}, or describe them in attention="
            )
        # A query that all heads share does not show the number of heads. If the
        # statistic has another number than the key, all heads are clipped together.
        of_query = [use.leaf for use in self.uses if use.role != "key"]
        self.is_shared = all(x.is_of_all for x in of_query) and bool(self.uses)

    def _fits(self, use: LeafInRole) -> bool:
        heads, of_leaf = self.shape[-1], use.row_shape[-1]
        is_part = self.shape[: len(use.row_shape) - 1] == use.row_shape[:-1]
        # Groups of query heads may share keys, and all heads may share any leaf.
        is_count = use.role == "key" or of_leaf in (1, heads)
        return is_part and is_count and (heads % of_leaf == 0 if of_leaf else not heads)

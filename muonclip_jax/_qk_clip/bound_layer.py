"""An attention layer bound to its leaves: its heads, and the scale of each leaf."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._layout.layout import cut_axes, own_block
from .._layout.shardings import mesh_axes
from .._model.attention_layers import AttentionLayer, READ_IT
from .._model.head_leaf import HeadLeaf
from .._model.statistics import largest, STATISTIC
from .._parameters.paths import Path, show, show_module, split


class BoundLayer:
    """The heads of a layer as they can be scaled, and the scales of its leaves.

    Shapes are those of the whole leaves, which mapped axes may cut: whether query heads
    share a key shows in the whole layer alone.

    **Raises:** `ValueError`, naming the leaves, where their heads do not fit together.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        leaf_at: dict[Path, Any],
        cut_at: dict[Path, PartitionSpec],
    ):
        self._layer = layer
        self._leaf_at = leaf_at
        self._cut_at = cut_at
        self.path = split(layer.path)
        self.threshold = layer.threshold
        # Heads that share a leaf can only be scaled together, as if they were one.
        self.is_shared = any(leaf.axis is None for leaf in layer.leaves)
        self._first = layer.leaves[0]  # of the query, or of what is scaled alone
        self._stack = self._first.stack(self._shape_of(self._first))
        self._heads = 1 if self.is_shared else self._count(self._first)
        if not self._fits():
            # Flax kernels are named, since another layout (features last, say) is the
            # likely cause: the numbers of heads then disagree.
            raise ValueError(
                f"the heads of attention layer '{show_module(self.path)}' do not fit "
                f"together: {self._leaves()}. Expected are Flax kernels (*stack, "
                "features, heads, head_dim) with key heads that divide the query's. "
                f"Other layouts: {READ_IT}, or describe them in attention="
            )
        self.shape: tuple[int, ...] = (*self._stack, self._heads)

    def check(self, statistic: jax.Array) -> tuple[jax.Array, PartitionSpec]:
        """The statistic of the heads as they can be scaled, and how it is cut.

        Inside `jax.shard_map` it may be of all heads, or of those of this device. The
        shape tells which: it is that of the whole layer, or what the spec of the query
        makes of it.
        """
        heads, row = self._heads, statistic
        if self.is_shared:
            heads, row = statistic.shape[-1], largest(statistic, -1)[..., None]
        expected = (*self._stack, heads)
        if statistic.shape == expected:
            return row, PartitionSpec()
        leaf = self._first
        cut = self._cut_at[self._layer.path_of(leaf)]
        spec = leaf.row_spec(len(self._shape_of(leaf)), cut)
        counts = [jax.lax.axis_size(mesh_axes(entry)) for entry in spec or ()]
        parts = [divmod(n, by) for n, by in zip(expected, counts, strict=False)]
        # Blocks that end within a head, or have heads from several places (those of a
        # split axis), have no statistic of their own.
        if spec is None or any(rest for _, rest in parts):
            raise ValueError(
                f"{sorted(cut_axes(cut))} cut '{show(self._layer.path_of(leaf))}' "
                "across heads: inside jax.shard_map give the statistics "
                f"'{show((*self.path, STATISTIC))}' of all heads, {expected}"
            )
        local = tuple(n for n, _ in parts)
        if statistic.shape != local:
            here = f", or {local} for those of one device" if local != expected else ""
            raise ValueError(
                f"the statistics '{show((*self.path, STATISTIC))}' have "
                f"shape {statistic.shape}, which does not fit the heads of "
                f"{self._leaves()}; expected is {expected}, (*stack, heads){here}"
            )
        return row, spec

    def scales(
        self, by_query: jax.Array, by_key: jax.Array, by_both: jax.Array
    ) -> dict[Path, jax.Array]:
        """One scale per leaf; several parts of a fused leaf multiply into one.

        A query and its key share `gamma` as `by_query` and `by_key`; a query whose key
        stays as it is is scaled `by_both`, the whole of it.
        """
        layer, scales = self._layer, {}
        roles = [(layer.query, by_query), (layer.key, by_key)]
        # In grouped-query attention several query heads share a key, of which the paper
        # says nothing. Scaled for the largest of them, the key would shrink the logits
        # of the others, too. So it stays, as the paper's shared rotary key does, and
        # each query alone brings its logits to the threshold.
        keys = {self._count(leaf) for leaf in layer.key}
        if not self.is_shared and keys and keys != {self._heads}:
            roles = [(layer.query, by_both)]
        # The logits of latent attention are q_c k_c + q_r k_r. The rotary key k_r is
        # one for all heads and stays, so that q_r needs the whole gamma for its part of
        # the sum to shrink as the other does (arXiv:2507.20534, algorithm 1).
        for leaves, factors in [*roles, (layer.rotary_query, by_both)]:
            for leaf in leaves:
                path = layer.path_of(leaf)
                scale = leaf.scale(self._shape_of(leaf), factors)
                scales[path] = scales[path] * scale if path in scales else scale
        # Made for whole leaves, since only these know which head an entry belongs to.
        return {path: own_block(x, self._cut_at[path]) for path, x in scales.items()}

    def _fits(self) -> bool:
        leaves, layer = self._layer.leaves, self._layer
        if any(self._count(leaf) is None for leaf in leaves):
            return False
        if any(leaf.stack(self._shape_of(leaf)) != self._stack for leaf in leaves):
            return False
        queries = {self._count(leaf) for leaf in layer.query + layer.rotary_query}
        keys = {self._count(leaf) for leaf in layer.key}
        if self.is_shared:
            return True
        if len(queries) != 1 or len(keys) > 1:
            return False
        key_heads = keys.pop() if keys else self._heads
        return self._heads % key_heads == 0 if key_heads else not self._heads

    def _count(self, leaf: HeadLeaf) -> Any:
        return leaf.heads(self._shape_of(leaf))

    def _shape_of(self, leaf: HeadLeaf) -> tuple[int, ...]:
        return tuple(self._leaf_at[self._layer.path_of(leaf)].shape)

    def _leaves(self) -> str:
        leaves = {self._layer.path_of(x): self._shape_of(x) for x in self._layer.leaves}
        return ", ".join(f"'{show(path)}' {shape}" for path, shape in leaves.items())

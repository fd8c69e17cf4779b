"""An attention layer bound to its leaves: which heads it has, and what scales them."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._jax_versions import gather_everywhere
from .._layout.layout import cut_axes, own_block
from .._layout.placement import mesh_axes
from .._model.attention_layers import AttentionLayer
from .._model.head_leaf import HeadLeaf
from .._model.statistics import largest, STATISTIC
from .._parameters.paths import Path, show, show_module, split


class BoundLayer:
    """Which heads a layer has, as they can be scaled, and how.

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
        self._stack = layer.query[0].stack(self._shape_of(layer.query[0]))
        self._heads = 1 if self.is_shared else self._count(layer.query[0])
        if not self._fits():
            raise ValueError(
                f"the heads of attention layer '{show_module(self.path)}' do not fit "
                f"together: {self._leaves()}. Expected are Flax kernels (*stack, "
                "features, heads, head_dim) with key heads that divide the query's; "
                "describe other layouts in attention="
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """`(*stack, heads)`"""
        return (*self._stack, self._heads or 0)

    def check(self, statistic: jax.Array) -> tuple[jax.Array, PartitionSpec]:
        """The statistic of the heads as they can be scaled, and how it is cut.

        Inside `jax.shard_map` it may be of all heads, or of those of this device.
        """
        heads, row = self._heads, statistic
        if self.is_shared:
            heads, row = statistic.shape[-1], largest(statistic, -1)[..., None]
        expected = (*self._stack, heads)
        if statistic.shape == expected:
            return row, PartitionSpec()
        leaf = self._layer.query[0]
        cut = self._cut_at[self._layer.path_of(leaf)]
        spec = leaf.row_spec(len(self._shape_of(leaf)), cut)
        counts = [jax.lax.axis_size(mesh_axes(entry)) for entry in spec or ()]
        parts = [divmod(n, by) for n, by in zip(expected, counts, strict=False)]
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
        stays as it is takes `by_both`, the whole of it.
        """
        layer, scales = self._layer, {}
        roles = [(layer.query, by_query), (layer.key, by_key)]
        if self._keys_stay:
            roles = [(layer.query, by_both)]
        for leaves, factors in [*roles, (layer.rotary_query, by_both)]:
            for leaf in leaves:
                path = layer.path_of(leaf)
                scale = leaf.scale(self._shape_of(leaf), factors)
                scales[path] = scales[path] * scale if path in scales else scale
        return {path: own_block(x, self._cut_at[path]) for path, x in scales.items()}

    @property
    def _keys_stay(self) -> bool:
        """Shared keys do, or heads under the threshold would shrink with the rest."""
        return not self.is_shared and self._count(self._layer.key[0]) != self._heads

    def _fits(self) -> bool:
        leaves, layer = self._layer.leaves, self._layer
        if any(self._count(leaf) is None for leaf in leaves):
            return False
        if any(leaf.stack(self._shape_of(leaf)) != self._stack for leaf in leaves):
            return False
        queries = {self._count(leaf) for leaf in layer.query + layer.rotary_query}
        keys = {self._count(leaf) for leaf in layer.key}
        if self.is_shared or len(queries) != 1 or len(keys) != 1:
            return self.is_shared
        key_heads = keys.pop()
        return self._heads % key_heads == 0 if key_heads else not self._heads

    def _count(self, leaf: HeadLeaf) -> Any:
        return leaf.heads(self._shape_of(leaf))

    def _shape_of(self, leaf: HeadLeaf) -> tuple[int, ...]:
        return tuple(self._leaf_at[self._layer.path_of(leaf)].shape)

    def _leaves(self) -> str:
        leaves = {self._layer.path_of(x): self._shape_of(x) for x in self._layer.leaves}
        return ", ".join(f"'{show(path)}' {shape}" for path, shape in leaves.items())


def gathered(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The whole row, the same on all devices, of blocks that a spec cuts."""
    for axis, entry in enumerate(spec):
        if names := mesh_axes(entry):
            blocks = jax.numpy.moveaxis(gather_everywhere(x, names), 0, axis)
            shape = [*x.shape[:axis], -1, *x.shape[axis + 1 :]]
            x = blocks.reshape(shape)
    return x

"""An attention layer bound to the shapes of its leaves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._model.attention_layers import AttentionLayer
from .._model.head_leaf import HeadLeaf
from .._model.statistics import largest, STATISTIC
from .._parameters.paths import Path, show, show_module, split


class BoundLayer:
    """Which heads a layer has, as they can be scaled, and how.

    **Raises:** `ValueError`, naming the leaves, where their heads do not fit together.
    """

    def __init__(self, layer: AttentionLayer, leaf_at: dict[Path, Any]):
        self._layer = layer
        self._leaf_at = leaf_at
        self.path = split(layer.path)
        self.threshold = layer.threshold
        # Heads that share a leaf can only be scaled together, as if they were one.
        self._shared = any(leaf.axis is None for leaf in layer.leaves)
        self._stack = layer.query[0].stack(self._shape_of(layer.query[0]))
        self._heads = 1 if self._shared else self._count(layer.query[0])
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

    def check(self, statistic: jax.Array) -> jax.Array:
        """The statistic, checked, of the heads as they can be scaled."""
        heads = statistic.shape[-1] if self._shared else self._heads
        expected = (*self._stack, heads)
        if statistic.shape != expected:
            raise ValueError(
                f"the statistics '{show((*self.path, STATISTIC))}' have "
                f"shape {statistic.shape}, which does not fit the heads of "
                f"{self._leaves()}; expected is {expected}, (*stack, heads)"
            )
        return largest(statistic, -1)[..., None] if self._shared else statistic

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
        return scales

    def log_size(self) -> jax.Array:
        """Log of the norms that `scales` multiplies by gamma, `(*stack, heads)`."""
        layer = self._layer
        roles = [layer.query] if self._keys_stay else [layer.query, layer.key]
        return functools.reduce(jnp.add, map(self._log_norm, roles))

    def _log_norm(self, leaves: tuple[HeadLeaf, ...]) -> jax.Array:
        """In float32, of the root of the sum of squares, which is never zero."""
        squares = [leaf.sum(_square(self._leaf_of(leaf))) for leaf in leaves]
        if self._shared:
            squares = [x.sum(-1, keepdims=True) for x in squares]
        # A kernel and its bias may be of two dtypes.
        wide = functools.reduce(np.promote_types, [x.dtype for x in squares])
        total = functools.reduce(jnp.add, [x.astype(wide) for x in squares])
        norm = jnp.sqrt(jnp.maximum(total, jnp.finfo(wide).tiny))
        return jnp.log(norm).astype(jnp.float32)

    @property
    def _keys_stay(self) -> bool:
        """Shared keys do, or heads under the threshold would shrink with the rest."""
        return not self._shared and self._count(self._layer.key[0]) != self._heads

    def _fits(self) -> bool:
        leaves, layer = self._layer.leaves, self._layer
        if any(self._count(leaf) is None for leaf in leaves):
            return False
        if any(leaf.stack(self._shape_of(leaf)) != self._stack for leaf in leaves):
            return False
        queries = {self._count(leaf) for leaf in layer.query + layer.rotary_query}
        keys = {self._count(leaf) for leaf in layer.key}
        if self._shared or len(queries) != 1 or len(keys) != 1:
            return self._shared
        key_heads = keys.pop()
        return self._heads % key_heads == 0 if key_heads else not self._heads

    def _count(self, leaf: HeadLeaf) -> Any:
        return leaf.heads(self._shape_of(leaf))

    def _shape_of(self, leaf: HeadLeaf) -> tuple[int, ...]:
        return tuple(self._leaf_of(leaf).shape)

    def _leaf_of(self, leaf: HeadLeaf) -> Any:
        return self._leaf_at[self._layer.path_of(leaf)]

    def _leaves(self) -> str:
        leaves = {self._layer.path_of(x): self._shape_of(x) for x in self._layer.leaves}
        return ", ".join(f"'{show(path)}' {shape}" for path, shape in leaves.items())


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(np.promote_types(x.dtype, jnp.float32)))

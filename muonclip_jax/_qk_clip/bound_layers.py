"""Attention layers bound to the shapes of their leaves."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._model import paths
from .._model.attention_layers import AttentionLayer
from .._model.head_leaf import HeadLeaf
from .._model.paths import split
from .._model.statistics import STATISTIC


class BoundLayer:
    """An attention layer with the shapes of its leaves at hand."""

    def __init__(self, layer: AttentionLayer, leaf_at: dict):
        self._layer = layer
        self._leaf_at = leaf_at
        # Heads that share a leaf can only be scaled together, as if they were one.
        self._shared = any(leaf.axis is None for leaf in layer.leaves)
        self._stack = layer.query[0].stack(self._shape_of(layer.query[0]))
        self._heads = 1 if self._shared else self._count(layer.query[0])
        if not self._fits():
            raise ValueError(
                f"the heads of attention layer '{self.path}' do not fit together: "
                f"{self._leaves()}. Expected are Flax kernels (*stack, features, "
                "heads, head_dim) with key heads that divide the query's; describe "
                "other layouts in attention="
            )

    @property
    def path(self) -> str:
        return self._layer.path

    @property
    def shape(self) -> tuple[int, ...]:
        """`(*stack, heads)`"""
        return (*self._stack, self._heads or 0)

    @property
    def threshold(self) -> Any:
        return self._layer.threshold

    def logits(self, statistic: jax.Array) -> jax.Array:
        """The statistic, checked, of the heads as they can be scaled."""
        heads = statistic.shape[-1] if self._shared else self._heads
        if statistic.shape != (*self._stack, heads):
            raise ValueError(
                f"the statistics '{paths.show((*split(self.path), STATISTIC))}' have "
                f"shape {statistic.shape}, which does not fit the heads of "
                f"{self._leaves()}; expected is {self.shape}, (*stack, heads)"
            )
        return statistic.max(-1, keepdims=True) if self._shared else statistic

    def scales(self, gamma: jax.Array, alpha: Any) -> dict[paths.Path, jax.Array]:
        """One scale per leaf; several parts of a fused leaf multiply into one."""
        layer, scales = self._layer, {}
        roles = [(layer.query, gamma**alpha), (layer.key, gamma ** (1 - alpha))]
        if not self._shared and self._count(layer.key[0]) != self._heads:
            # Shared keys stay, or heads under the threshold would shrink with the rest.
            roles = [(layer.query, gamma)]
        for leaves, factors in [*roles, (layer.rotary_query, gamma)]:
            for leaf in leaves:
                path = layer.path_of(leaf)
                scale = leaf.scale(self._shape_of(leaf), factors)
                scales[path] = scales[path] * scale if path in scales else scale
        return scales

    def _fits(self) -> bool:
        leaves, layer = self._layer.leaves, self._layer
        if any(self._count(leaf) is None for leaf in leaves):
            return False
        if any(leaf.stack(self._shape_of(leaf)) != self._stack for leaf in leaves):
            return False
        queries = {self._count(leaf) for leaf in layer.query + layer.rotary_query}
        keys = {self._count(leaf) for leaf in layer.key}
        return self._shared or (
            len(queries) == len(keys) == 1 and self._heads % keys.pop() == 0
        )

    def _count(self, leaf: HeadLeaf) -> Any:
        return leaf.heads(self._shape_of(leaf))

    def _shape_of(self, leaf: HeadLeaf) -> tuple[int, ...]:
        return tuple(self._leaf_at[self._layer.path_of(leaf)].shape)

    def _leaves(self) -> str:
        leaves = {self._layer.path_of(x): self._shape_of(x) for x in self._layer.leaves}
        return ", ".join(f"'{paths.show(p)}' {shape}" for p, shape in leaves.items())


def bind(
    params: paths.PathedTree, layers: Sequence[AttentionLayer]
) -> list[BoundLayer]:
    """Finds the leaves of each layer that the mask shows."""
    leaf_at = dict(zip(params.paths, params.leaves, strict=True))
    return [BoundLayer(layer, leaf_at) for layer in layers if _shows(layer, leaf_at)]


def count_heads(layers: Sequence[BoundLayer]) -> int:
    return sum(math.prod(layer.shape) for layer in layers)


def to_row(arrays: Sequence[jax.Array]) -> jax.Array:
    """The heads of all layers, one after the other."""
    return jnp.concatenate([_everywhere(x).ravel() for x in arrays])


def _everywhere(x: jax.Array) -> jax.Array:
    """A copy on every device, where axes are explicit and heads were cut along some."""
    spec = jax.typeof(x).sharding.spec
    return jax.sharding.reshard(x, PartitionSpec()) if any(spec) else x


def from_row(row: jax.Array, layers: Sequence[BoundLayer]) -> list[jax.Array]:
    """One array `(*stack, heads)` for each layer."""
    ends = list(itertools.accumulate(math.prod(layer.shape) for layer in layers))
    parts = jnp.split(row, ends[:-1]) if layers else []
    return [x.reshape(y.shape) for x, y in zip(parts, layers, strict=True)]


def _shows(layer: AttentionLayer, leaf_at: dict) -> bool:
    """Whether a layer is to be clipped; `optax.masked` may hide it, but only whole."""
    for role in ("query", "key"):
        if not getattr(layer, role):
            raise ValueError(f"attention layer '{layer.path}' names no {role}")
    own = [layer.path_of(leaf) for leaf in layer.leaves]
    absent = [path for path in own if path not in leaf_at]
    if absent:
        raise ValueError(
            f"attention= names {paths.show_all(absent)}, which the params lack"
        )
    hidden = [path for path in own if paths.is_masked(leaf_at[path])]
    if hidden and len(hidden) < len(own):
        raise ValueError(
            f"the mask hides {paths.show_all(hidden)} but not the rest of attention "
            f"layer '{layer.path}'; QK-Clip scales kernels and biases together"
        )
    return not hidden

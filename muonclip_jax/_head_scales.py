"""From per-head statistics to one scale per parameter leaf."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _paths
from ._attention_layers import AttentionLayer
from ._attention_stats import maximum_over, read_attention_stats, STATISTIC
from ._head_leaf import HeadLeaf
from ._paths import split


_HOW_TO_RECORD = (
    "Use attention_fn=mc.attention_fn, call the layer with sow_weights=True and read "
    "the intermediates back: mutable=['intermediates'] in Linen (with "
    "variable_axes={'intermediates': 0} under nn.scan), nnx.capture(..., "
    "nnx.Intermediate) in NNX"
)


class HeadScales(NamedTuple):
    """What to multiply each leaf by, and the statistics that led to it."""

    leaves: list[jax.Array | None]  # broadcast against the leaf; None leaves it alone
    logits: jax.Array  # (all heads,), float32
    threshold: Any

    def summary(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the largest finite logit and the clipped and non-finite counts."""
        finite = jnp.isfinite(self.logits)
        clipped = finite & (self.logits > self.threshold)
        largest = jnp.max(self.logits, initial=-jnp.inf, where=finite)
        return largest, _count(clipped), _count(~finite)


def head_scales(
    params: _paths.PathedTree,
    layers: Sequence[AttentionLayer],
    attention_stats: Any,
    threshold: Any,
    alpha: Any,
    axis_name: Hashable | None = None,
) -> HeadScales:
    """Binds statistics to leaves; raises, naming paths, where they do not fit."""
    stats = read_attention_stats(attention_stats)
    _check_matched(layers, stats)
    if axis_name is not None:
        stats = maximum_over(stats, axis_name)
    leaf_at = dict(zip(params.paths, params.leaves, strict=True))
    scale_at: dict[_paths.Path, jax.Array] = {}
    logits = [jnp.zeros((0,), jnp.float32)]
    for layer in layers:
        if _is_visible(layer, leaf_at):
            bound = _BoundLayer(layer, leaf_at, stats[split(layer.path)])
            scale_at |= bound.scales(threshold, alpha)
            logits.append(bound.logits.ravel())
    scales = [scale_at.get(path) for path in params.paths]
    return HeadScales(scales, jnp.concatenate(logits), threshold)


def clip_factors(logits: jax.Array, threshold: Any) -> jax.Array:
    """`tau/S` where a finite `S` exceeds `tau`, exactly 1 elsewhere."""
    over = jnp.isfinite(logits) & (logits > threshold)
    return jnp.where(over, threshold / jnp.where(over, logits, 1), 1).astype(
        jnp.float32
    )


class _BoundLayer:
    """An attention layer with its leaves and its statistic at hand."""

    def __init__(self, layer: AttentionLayer, leaf_at: dict, logits: jax.Array):
        self._layer = layer
        self._leaf_at = leaf_at
        self.logits = logits

    def scales(self, threshold: Any, alpha: Any) -> dict[_paths.Path, jax.Array]:
        layer, heads = self._layer, self.logits.shape[-1]
        queries = layer.query + layer.rotary_query
        if any(self._heads(leaf) != heads for leaf in queries):
            raise ValueError(self._mismatch())
        key_heads = {self._heads(leaf) for leaf in layer.key}
        if any(n is None or heads % n for n in key_heads):
            raise ValueError(self._mismatch())
        gamma = clip_factors(self.logits, threshold)
        if key_heads == {heads}:
            parts = [(layer.query, gamma**alpha), (layer.key, gamma ** (1 - alpha))]
        else:
            # Shared keys stay, or heads under the threshold would shrink with the rest.
            parts = [(layer.query, gamma)]
        return self._multiply([*parts, (layer.rotary_query, gamma)])

    def _multiply(self, parts) -> dict[_paths.Path, jax.Array]:
        """One scale per leaf; several parts of a fused leaf multiply into one."""
        scales: dict[_paths.Path, jax.Array] = {}
        for leaves, factors in parts:
            for leaf in leaves:
                path = self._layer.path_of(leaf)
                scale = leaf.scale(self._shape(path), factors)
                scales[path] = scales[path] * scale if path in scales else scale
        return scales

    def _heads(self, leaf: HeadLeaf) -> int | None:
        return leaf.heads(
            self._shape(self._layer.path_of(leaf)), self.logits.shape[:-1]
        )

    def _shape(self, path: _paths.Path) -> tuple[int, ...]:
        return tuple(self._leaf_at[path].shape)

    def _mismatch(self) -> str:
        paths = dict.fromkeys(self._layer.path_of(leaf) for leaf in self._layer.leaves)
        leaves = ", ".join(f"'{_paths.show(p)}' {self._shape(p)}" for p in paths)
        statistic = _paths.show((*split(self._layer.path), STATISTIC))
        return (
            f"the statistics '{statistic}' have shape {self.logits.shape}, which does "
            f"not fit the heads of {leaves}. Expected are statistics (*stack, heads) "
            "for Flax kernels (*stack, features, heads, head_dim); describe other "
            "layouts in attention="
        )


def _is_visible(layer: AttentionLayer, leaf_at: dict) -> bool:
    """Whether a layer is to be clipped; `optax.masked` may hide it, but only whole."""
    for role in ("query", "key"):
        if not getattr(layer, role):
            raise ValueError(f"attention layer '{layer.path}' names no {role}")
    paths = [layer.path_of(leaf) for leaf in layer.leaves]
    absent = [path for path in paths if path not in leaf_at]
    if absent:
        raise ValueError(
            f"attention= names {_paths.show_all(absent)}, which the params lack"
        )
    hidden = [path for path in paths if _paths.is_masked(leaf_at[path])]
    if hidden and len(hidden) < len(paths):
        raise ValueError(
            f"the mask hides {_paths.show_all(hidden)} but not the rest of attention "
            f"layer '{layer.path}'; QK-Clip scales kernels and biases together"
        )
    return not hidden


def _check_matched(layers: Sequence[AttentionLayer], stats: dict) -> None:
    known = {split(layer.path) for layer in layers}
    missing = [module for module in known if module not in stats]
    if missing:
        raise ValueError(
            "no statistics for the attention layers "
            f"{_paths.show_all(sorted(missing))}. {_HOW_TO_RECORD}"
        )
    strays = [(*module, STATISTIC) for module in stats if module not in known]
    if strays:
        raise ValueError(
            f"the statistics {_paths.show_all(strays)} match no query and key in the "
            f"params; attention layers are {_paths.show_all(sorted(known)) or 'none'}"
        )


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)

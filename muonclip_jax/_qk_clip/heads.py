"""The heads of all attention layers in one row: read, cut by layer, spread on leaves.

statistics -> row -> gamma -> one row per layer -> one scale per leaf.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax_versions import manual_axes
from .._matrices.unstack import unstack
from .._model.attention_layers import (
    Attention,
    AttentionLayer,
    resolve_attention,
    show_layer,
)
from .._model.head_leaf import everywhere
from .._model.named_attention import check_none_overlooked
from .._model.statistics import read_attention_stats, STATISTIC
from .._parameters.paths import (
    is_masked,
    Path,
    PathedTree,
    show_all,
    show_module,
    split,
)
from .bound_layer import BoundLayer


_HOW_TO_RECORD = (
    "Use attention_fn=mc.attention_fn, call the layer with sow_weights=True and read "
    "the intermediates back: mutable=['intermediates'] in Linen (with "
    "variable_axes={'intermediates': 0} under nn.scan), nnx.capture(..., "
    "nnx.Intermediate) in NNX"
)


class MappedAxes(dict[Hashable, None]):
    """The mapped axes that a row is maximised over, as its readers say when traced."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("logits",),
    meta_fields=("shapes", "axes"),
)
@dataclasses.dataclass(frozen=True)
class HeadRow:
    """Statistics that have been read: what `multi_steps` hands to `qk_clip`."""

    logits: jax.Array  # (all heads,)
    shapes: tuple[tuple[Path, tuple[int, ...]], ...]  # (*stack, heads) of each layer
    axes: MappedAxes

    def by_layer(self) -> dict[Path, jax.Array]:
        parts = _cut(self.logits, [shape for _, shape in self.shapes])
        return {path: x for (path, _), x in zip(self.shapes, parts, strict=True)}


class Heads:
    """The attention layers that the mask shows, the heads of one behind the other's."""

    def __init__(self, tree: PathedTree, attention: Attention | None):
        layers, leaf_at = resolve_attention(attention, tree), tree.by_path()
        if attention is None:
            check_none_overlooked(tree, layers)
        self._known = {split(layer.path) for layer in layers}
        self._is_hidden = leaf_at.hides
        self.layers = [
            BoundLayer(layer, leaf_at) for layer in layers if _is_shown(layer, leaf_at)
        ]

    @property
    def shapes(self) -> tuple[tuple[Path, tuple[int, ...]], ...]:
        return tuple((layer.path, layer.shape) for layer in self.layers)

    @property
    def count(self) -> int:
        return sum(math.prod(layer.shape) for layer in self.layers)

    def read(
        self, attention_stats: Any, axis_name: Hashable | None = None
    ) -> jax.Array:
        """The statistic of all heads, `(all heads,)` float32, maximised over an axis.

        **Raises:** `ValueError`, naming the paths, where statistics are missing or do
        not fit.
        """
        row = self._row(attention_stats, axis_name)
        return maximum_over(row, _named(axis_name))

    def read_sized(
        self, attention_stats: Any, axis_name: Hashable | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """`read`, and the log of `|W_q| |W_k|` alike, in one collective.

        Devices that hold parts of the weights agree on the largest.
        """
        logits = self._row(attention_stats, axis_name)
        log_sizes = _to_row([layer.log_size() for layer in self.layers])
        # Those that a batch does not vary over: along them, only weights are cut.
        others = manual_axes(log_sizes) - {axis_name}
        log_sizes = maximum_over(log_sizes, sorted(others))
        both = jnp.concatenate([logits, log_sizes])
        both = maximum_over(both, _named(axis_name))
        return both[: self.count], both[self.count :]

    def cut(self, row: jax.Array) -> list[jax.Array]:
        """One array `(*stack, heads)` for each layer."""
        return _cut(row, [layer.shape for layer in self.layers])

    def thresholds(self, default: Any, at: Callable[[Any], Any]) -> jax.Array:
        """That of each head, or of all; `at` gives a schedule's value at this step."""
        common = jnp.asarray(at(default), jnp.float32)
        if not common.ndim and all(layer.threshold is None for layer in self.layers):
            return common
        return _to_row([_threshold(layer, default, at) for layer in self.layers])

    def scales(self, gamma: jax.Array, alpha: Any) -> dict[Path, jax.Array]:
        """What to multiply each leaf by."""
        shares = gamma**alpha, gamma ** (1 - alpha), gamma
        by_layer = zip(*(self.cut(share) for share in shares), strict=True)
        scales: dict[Path, jax.Array] = {}
        for layer, factors in zip(self.layers, by_layer, strict=True):
            scales |= layer.scales(*factors)
        return scales

    def _row(self, attention_stats: Any, axis_name: Hashable | None) -> jax.Array:
        if attention_stats is None:
            raise ValueError(
                "qk_clip needs attention_stats: tx.update(grads, state, params, "
                "attention_stats=stats), with the 'intermediates' that mc.attention_fn "
                "sows; pass attention_stats={} for a model without attention"
            )
        if not isinstance(attention_stats, HeadRow):
            return self._checked(read_attention_stats(attention_stats))
        attention_stats.axes.update(dict.fromkeys(_named(axis_name)))
        if attention_stats.shapes == self.shapes:
            return attention_stats.logits
        return self._checked(attention_stats.by_layer())

    def _checked(self, stats: dict[Path, jax.Array]) -> jax.Array:
        self._check_matched(stats)
        return _to_row([layer.check(stats[layer.path]) for layer in self.layers])

    def _check_matched(self, stats: dict[Path, jax.Array]) -> None:
        missing = [layer.path for layer in self.layers if layer.path not in stats]
        if missing:
            raise ValueError(
                "no statistics for the attention layers "
                f"{show_all(sorted(missing))}. {_HOW_TO_RECORD}"
            )
        strays = [
            (*path, STATISTIC)
            for path in stats
            if path not in self._known and not self._is_hidden(path)
        ]
        if strays:
            known = show_all(sorted(self._known)) or "none"
            raise ValueError(
                f"the statistics {show_all(strays)} match no query and key in the "
                f"params; attention layers are {known}"
            )


def maximum_over(row: jax.Array, axes: Iterable[Hashable]) -> jax.Array:
    """The maximum over the replicas along mapped axes, in one collective for each."""
    for axis_name in axes if row.size else ():
        # A NaN on one replica must reach all of them, and a maximum may drop it.
        row = jax.lax.pmax(jnp.where(jnp.isnan(row), jnp.inf, row), axis_name)
    return row


def _named(axis_name: Hashable | None) -> list[Hashable]:
    return [] if axis_name is None else [axis_name]


def _is_shown(layer: AttentionLayer, leaf_at: dict[Path, Any]) -> bool:
    """Whether a layer is to be clipped; `optax.masked` may hide it, but only whole."""
    own = [layer.path_of(leaf) for leaf in layer.leaves]
    hidden = [path for path in own if is_masked(leaf_at[path])]
    if hidden and len(hidden) < len(own):
        raise ValueError(
            f"the mask hides {show_all(hidden)} but not the rest of attention "
            f"layer '{show_layer(layer)}'; QK-Clip scales kernels and "
            "biases together"
        )
    return not hidden


def _threshold(layer: BoundLayer, default: Any, at: Callable[[Any], Any]) -> jax.Array:
    """`(*stack, heads)`, from a number or from one for each layer of the stack."""
    own = default if layer.threshold is None else layer.threshold
    threshold = jnp.asarray(at(own), jnp.float32)
    *stack, _ = layer.shape
    if threshold.shape not in ((), tuple(stack)):
        raise ValueError(
            f"threshold of shape {threshold.shape} does not fit the layer "
            f"'{show_module(layer.path)}': expected is one number"
            + (f", or one for each of its layers, {tuple(stack)}" if stack else "")
        )
    return jnp.broadcast_to(threshold[..., None], layer.shape)


def _to_row(arrays: Sequence[jax.Array]) -> jax.Array:
    flat = [everywhere(x).ravel().astype(jnp.float32) for x in arrays]
    return jnp.concatenate([jnp.zeros(0, jnp.float32), *flat])


def _cut(row: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    parts = unstack(row, [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

"""From per-head statistics to one scale per parameter leaf."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._model import paths
from .._model.attention_layers import AttentionLayer
from .._model.paths import split
from .._model.statistics import maximum_over, read_attention_stats, STATISTIC
from .bound_layers import bind, BoundLayer


_HOW_TO_RECORD = (
    "Use attention_fn=mc.attention_fn, call the layer with sow_weights=True and read "
    "the intermediates back: mutable=['intermediates'] in Linen (with "
    "variable_axes={'intermediates': 0} under nn.scan), nnx.capture(..., "
    "nnx.Intermediate) in NNX"
)


class HeadReading(NamedTuple):
    """What a step sees in the heads of one layer; each `(*stack, heads)`."""

    max_logits: jax.Array  # float32
    clipped: jax.Array  # bool
    gamma: jax.Array  # float32


class HeadScales(NamedTuple):
    """What to multiply each leaf by, and the readings that led to it."""

    leaves: list[jax.Array | None]  # broadcast against the leaf; None leaves it alone
    readings: list[HeadReading]  # one for each layer that `bind` returns


def head_scales(
    params: paths.PathedTree,
    layers: Sequence[AttentionLayer],
    attention_stats: Any,
    alpha: Any,
    axis_name: Hashable | None = None,
) -> HeadScales:
    """Binds statistics to leaves; raises, naming paths, where they do not fit.

    Every layer carries its threshold.
    """
    scale_at: dict[paths.Path, jax.Array] = {}
    readings = []
    for layer, logits in layer_logits(params, layers, attention_stats, axis_name):
        reading = read_heads(logits, layer.threshold)
        scale_at |= layer.scales(reading.gamma, alpha)
        readings.append(reading)
    return HeadScales([scale_at.get(path) for path in params.paths], readings)


def layer_logits(
    params: paths.PathedTree,
    layers: Sequence[AttentionLayer],
    attention_stats: Any,
    axis_name: Hashable | None = None,
) -> list[tuple[BoundLayer, jax.Array]]:
    """Returns each layer that the mask shows with its statistic."""
    if attention_stats is None:
        raise ValueError(
            "qk_clip needs attention_stats: tx.update(grads, state, params, "
            "attention_stats=stats), with the 'intermediates' that mc.attention_fn "
            "sows; pass attention_stats={} for a model without attention"
        )
    bound = bind(params, layers)
    stats = read_attention_stats(attention_stats)
    _check_matched(layers, bound, stats)
    if axis_name is not None:
        stats = maximum_over(stats, axis_name)
    return [(layer, layer.logits(stats[split(layer.path)])) for layer in bound]


def read_heads(logits: jax.Array, threshold: Any) -> HeadReading:
    """`gamma` is `tau/S` where a finite `S` exceeds `tau`, exactly 1 elsewhere."""
    threshold = jnp.asarray(threshold, jnp.float32)
    if threshold.ndim:  # one per layer of a stack
        threshold = threshold[..., None]
    over = jnp.isfinite(logits) & (logits > threshold)
    gamma = jnp.where(over, threshold / jnp.where(over, logits, 1), 1)
    return HeadReading(logits, over, gamma.astype(jnp.float32))


def _check_matched(
    layers: Sequence[AttentionLayer], bound: Sequence[BoundLayer], stats: dict
) -> None:
    missing = [split(layer.path) for layer in bound if split(layer.path) not in stats]
    if missing:
        raise ValueError(
            "no statistics for the attention layers "
            f"{paths.show_all(sorted(missing))}. {_HOW_TO_RECORD}"
        )
    known = {split(layer.path) for layer in layers}
    strays = [(*module, STATISTIC) for module in stats if module not in known]
    if strays:
        raise ValueError(
            f"the statistics {paths.show_all(strays)} match no query and key in the "
            f"params; attention layers are {paths.show_all(sorted(known)) or 'none'}"
        )

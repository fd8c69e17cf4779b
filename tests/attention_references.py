"""Attention in float64 NumPy, whole, and its slope along a direction."""

import numpy as np


def naive_attention(query, key, value, *, bias=None, mask=None, scale=None):
    """Output and statistic, for whatever NumPy broadcasts."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[-2] // max(key.shape[-2], 1)
    key, value = (np.repeat(x, group, axis=-2) for x in (key, value))
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    logits = scale * np.einsum("...thd,...shd->...hts", query, key)
    alone = logits  # what query and key make
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        logits, alone = logits + bias, np.where(bias <= -1e4, -np.inf, alone)
    if mask is not None:
        logits, alone = (np.where(mask, x, -np.inf) for x in (logits, alone))
    largest = logits.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(largest), largest, 0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total > 0, total, 1)
    others = tuple(a for a in range(logits.ndim) if a != logits.ndim - 3)
    output = np.einsum("...hts,...shd->...thd", weights, value)
    return output, alone.max(others, initial=-np.inf)


def slope(function, arrays, directions, step=1e-5):
    """Of `function(*arrays)` along the directions, by a central difference."""
    pairs = [(np.float64(x), d) for x, d in zip(arrays, directions, strict=True)]
    ahead, back = (function(*(x + s * d for x, d in pairs)) for s in (step, -step))
    return (ahead - back) / (2 * step)


def draw(seed, *shapes, dtype=np.float32):
    generator = np.random.default_rng(seed)
    return [np.asarray(generator.normal(size=s), dtype) for s in shapes]

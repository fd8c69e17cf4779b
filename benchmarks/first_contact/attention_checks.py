"""Attention and its largest logits, by the kernels of the platform, against float64.

Inputs are rounded to what the platform trains in, so that products are exact and only
the results are rounded.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import muonclip_jax as mc

from .rounding import normal, platform, units
from .rows import Checks, Compared, Outcome, worst


SHAPE = (2, 256, 4, 64)
RECORDED: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (50, 0)},
    "shared keys": {"key_heads": 2, "is_causal": True},
    "logits of 1e4": {"scale": 2.0**12},
    "logits of 1e-4": {"scale": 2.0**-12},
}
Attention = Callable[..., tuple[jax.Array, jax.Array]]


def attention_checks() -> Checks:
    return {
        "max_logits": exact_maxima,
        "blockwise_attention": functools.partial(exact, mc.blockwise_attention),
        "splash_attention": splash,
        **{
            f"cuDNN's logits, recorded, {name}": functools.partial(by_cudnn, **options)
            for name, options in RECORDED.items()
        },
    }


def dtype() -> str:
    return "float32" if platform() == "cpu" else "bfloat16"


def inputs() -> list[jax.Array]:
    return [(2 * normal(i, *SHAPE)).astype(dtype()) for i in range(3)]


def reference() -> tuple[np.ndarray, np.ndarray]:
    """Causal attention and the largest logits, all formed at once in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in inputs())
    logits = np.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(SHAPE[-1])
    logits = np.where(np.tri(SHAPE[1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = np.einsum("bhij,bjhd->bihd", weights, value)
    return output, logits.max((0, 2, 3))


def by_cudnn(key_heads: int = 4, scale: float = 1.0, **options: Any) -> Outcome:
    """Of `jax.nn.dot_product_attention`, as `record_attention` has them."""
    if platform() != "gpu":
        return "no cuDNN here"
    query, key, value = inputs()
    key, value = (x[:, :, :key_heads] for x in (key, value))

    def fun(params: Any, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            query * params["q"],
            key * params["k"],
            value,
            implementation="cudnn",
            **options,
        )

    params = {"q": jnp.full((4, 64), scale, dtype()), "k": jnp.ones(64, dtype())}
    [found] = jax.tree.leaves(jax.jit(mc.record_attention(fun))(params, value)[1])
    own = np.asarray(query * params["q"], np.float64)
    keys = np.repeat(np.asarray(key, np.float64), 4 // key_heads, 2)
    logits = np.einsum("bihd,bjhd->bhij", own, keys) / math.sqrt(SHAPE[-1])
    ahead = np.arange(SHAPE[1]) - np.arange(SHAPE[1])[:, None]
    before, after = options.get("local_window_size", (SHAPE[1], SHAPE[1]))
    after = 0 if options.get("is_causal") else after
    seen = (ahead >= -before) & (ahead <= after)
    exact = np.where(seen, logits, -np.inf).max((0, 2, 3))
    return Compared(largest_error(found, exact), units(8, "float32"))


def exact_maxima() -> Compared:
    query, key, _ = inputs()
    found = mc.max_logits(query, key, is_causal=True)
    return Compared(largest_error(found, reference()[1]), units(8, "float32"))


def exact(attention: Attention, maxima: float | None = None) -> Compared:
    """The worse of output and largest logits for its bound, or for that of `maxima`."""
    found, expected = attention(*inputs(), is_causal=True), reference()
    bounds = units(4, dtype()), maxima or units(8, "float32")
    errors = map(largest_error, found, expected)
    return worst(map(Compared, errors, bounds))


def splash() -> Outcome:
    if platform() != "tpu":
        return "no TPU"
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    # The kernel rounds the scaled query, and with it the statistic.
    return exact(mc.splash_attention, maxima=units(2, dtype()))


def largest_error(found: jax.Array, expected: np.ndarray) -> float:
    """As a share of the largest value."""
    error = np.abs(np.asarray(jnp.float32(found), np.float64) - expected)
    return float(error.max() / np.abs(expected).max())

"""How an architecture is written down for the tests, and the layers that many share.

Each is written from its paper, small, with the real structure and the leaf names of the
public implementation. Alongside every shape is what the leaf is in the field:
projections are matrices; routers, depthwise windows, decays and steps, what
hyper-connections have, and projections to one number for each head go to AdamW
(Qwen3.8-Flash-Next's report; MaxText's `muon_include_routers`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


B, T, D, V = 2, 6, 16, 23  # batch, tokens, features, vocabulary
CAUSAL = jnp.asarray(np.tril(np.ones((T, T), bool)))


class Leaf(NamedTuple):
    """Shape, label, and of a matrix the axes of its inputs and outputs."""

    shape: tuple[int, ...]
    label: str
    inputs: Any = None
    outputs: Any = None


class Layer(NamedTuple):
    """An attention layer that can be clipped: its heads, and the leaves that scale."""

    heads: int
    query: tuple[str, ...]
    key: tuple[str, ...] = ()
    rotary_query: tuple[str, ...] = ()


#: The largest logit of each head by the path of its layer, which a model fills in.
Seen = dict[str, jax.Array] | None


@dataclasses.dataclass
class Architecture:
    """A model: what its leaves are, and what it computes.

    - `leaves`: a tree of `Leaf`.
    - `loss`: of params, inputs, and `Seen`.
    - `inputs`: shapes and dtypes.
    - `layers`: attention that can be clipped, by path.
    - `refused`: paths of attention that no parameter scales linearly.
    """

    leaves: Any
    loss: Callable[..., jax.Array]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    layers: dict[str, Layer] = dataclasses.field(default_factory=dict)
    refused: tuple[str, ...] = ()


# Leaves. A layer of PyTorch keeps outputs first, as `weight`.


def matrix(*shape, inputs: Any = 0, outputs: Any = 1):
    return Leaf(shape, "matrix", inputs, outputs)


def vector(*shape):
    return Leaf(shape, "vector")


def weight(label: str, *shape):
    return {"weight": Leaf(shape, label)}


def linear_leaves(outputs: int, inputs: int, bias: bool = False):
    kernel = {"weight": matrix(outputs, inputs, inputs=1, outputs=0)}
    return kernel | ({"bias": vector(outputs)} if bias else {})


def gain(n: int = D):
    return weight("vector", n)


def gain_and_shift(n: int = D):
    return {"weight": vector(n), "bias": vector(n)}


def window(channels: int, size: int = 4):
    """A depthwise convolution over time."""
    return weight("vector", channels, 1, size)


TOKENS = jax.ShapeDtypeStruct((B, T), jnp.int32)
TABLE = weight("embedding", V, D)
HEAD = weight("head", V, D)


# Layers.


def linear(p, x):
    y = x @ p["weight"].T
    return y + p["bias"] if "bias" in p else y


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def centered(x):
    return normed(x - x.mean(-1, keepdims=True))


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def rms_norm(p, x):
    return normed(x) * p["weight"]


def layer_norm(p, x):
    return centered(x) * p["weight"] + p["bias"]


def cross_entropy(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def cut(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


def joined(x):
    return x.reshape(*x.shape[:-2], -1)


def rotated(x):
    """By rotary positions; tokens are the axis before the heads."""
    first, second = jnp.split(x, 2, -1)
    angle = jnp.arange(x.shape[-3])[:, None, None] / 3.0
    turned = jnp.concatenate([-second, first], -1)
    return x * jnp.cos(angle) + turned * jnp.sin(angle)


def convolved(kernel, x):
    """Each channel along time, with a window of `(channels, 1, size)`, causal."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1,),
        [(kernel.shape[-1] - 1, 0)],
        dimension_numbers=("NWC", "OIW", "NWC"),
        feature_group_count=x.shape[-1],
    )


def attend(seen: Seen, path: str, query, key, value, *, mask=None, bias=None):
    """Softmax attention of `(..., t, heads, head_dim)`; keys may be of groups."""
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(y, group, -2) for y in (key, value))
    logits = jnp.einsum("...qhd,...khd->...hqk", query, key)
    logits = logits / query.shape[-1] ** 0.5
    if seen is not None:
        shown = logits if mask is None else jnp.where(mask, logits, -1e9)
        seen[path] = shown.max([i for i in range(logits.ndim) if i != logits.ndim - 3])
    logits = logits if bias is None else logits + bias
    logits = logits if mask is None else jnp.where(mask, logits, -1e9)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(logits), value)

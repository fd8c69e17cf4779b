"""Attention of many kinds as plain functions, and what their heads' logits are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import normal


B, T, D, H, DIM = 2, 5, 12, 4, 6  # batch, tokens, features, heads, features of each


@dataclasses.dataclass
class Case:
    """One way to make query and key.

    - `shapes`: of the parameters.
    - `heads`: from params and `x` to query `(b, t, h, d)` and key.
    """

    shapes: dict[str, Any]
    heads: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]

    def params(self, seed: int = 0):
        shapes = {"inner": self.shapes, "value": (D, D)}
        flat, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: type(x) is tuple)
        return treedef.unflatten(
            [normal((seed, i), *shape) for i, shape in enumerate(flat)]
        )

    def logits(self, params, x):
        """`(b, h, q, k)` without mask or scale, for keys that groups share too."""
        query, key = self.heads(params["inner"], x)
        group = query.shape[2] // key.shape[2]
        key = jnp.repeat(key, group, 2)
        return jnp.einsum("bqhd,bkhd->bhqk", query, key)

    def loss(self, params, x):
        weights = jax.nn.softmax(self.logits(params, x))
        return jnp.sum(jnp.einsum("bhqk,bkd->bqhd", weights, x @ params["value"]) ** 2)

    def largest(self, params, x):
        return np.asarray(self.logits(params, x).max((0, 2, 3)))


def cut(x, heads=H):
    return x.reshape(*x.shape[:2], heads, -1)


def rotated(x):
    first, second = jnp.split(x, 2, axis=-1)
    angle = jnp.arange(x.shape[1])[None, :, None, None] / 3
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * jnp.cos(angle) + turned * jnp.sin(angle)


def rotated_pairs(x):
    """Even and odd entries turn together, as complex numbers."""
    angle = jnp.arange(x.shape[1])[None, :, None, None] / 3
    a, b = x[..., ::2], x[..., 1::2]
    turned = (
        a * jnp.cos(angle) - b * jnp.sin(angle),
        a * jnp.sin(angle) + b * jnp.cos(angle),
    )
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _flat(p, x):
    return cut(x @ p["q"]), cut(x @ p["k"])


def _biased(p, x):
    return cut(x @ p["q"] + p["bq"]), cut(x @ p["k"] + p["bk"])


def _einsum(p, x):
    return (
        jnp.einsum("btd,hdk->bthk", x, p["q"]),
        jnp.einsum("btd,hdk->bthk", x, p["kv"][0]),
    )


def _fused(p, x):
    query, key, _ = jnp.split(x @ p["qkv"] + p["b"], 3, axis=-1)
    return cut(query), cut(key)


def _thirds(p, x):
    qkv = (x @ p["qkv"]).reshape(B, T, 3, H, DIM)
    return qkv[:, :, 0], qkv[:, :, 1]


def _interleaved(p, x):
    query, key, _ = jnp.split(cut(x @ p["qkv"] + p["b"]), 3, axis=-1)
    return rotated(query), rotated(key)


def _partial(p, x):
    query, key = _flat(p, x)

    def turn(y):
        return jnp.concatenate([rotated(y[..., :2]), y[..., 2:]], -1)

    return turn(query), turn(key)


def _pairs(p, x):
    query, key = _flat(p, x)
    return rotated_pairs(query), rotated_pairs(key)


def _grouped(p, x):
    return rotated(cut(x @ p["q"])), rotated(cut(x @ p["k"], 2))


def _transposed(p, x):
    """Kernels of `(out, in)`, as Equinox has them."""
    return cut(x @ p["q"].T), cut(jnp.einsum("btd,od->bto", x, p["k"]))


def _gains(p, x):
    query, key = _flat(p, x)
    return normed(query) * p["gq"], normed(key) * p["gk"]


def _gains_of_heads(p, x):
    query, key = _flat(p, x)
    return rotated(normed(query) * p["gq"]), rotated(normed(key) * p["gk"])


def _adapted(p, x):
    query = x @ p["q"] + (x @ p["qa"]) @ p["qb"]
    return cut(query), cut(x @ (p["k"] + p["ka"] @ p["kb"]))


def _latent(p, x):
    """Queries of low rank, a key joined of each head's own and a shared, turned one."""
    query = cut(normed(x @ p["q_a"]) @ p["q_b"])
    low, shared = jnp.split(x @ p["kv_a"], [5], axis=-1)
    key = cut(normed(low) @ p["kv_b"])[..., :4]
    query = jnp.concatenate([query[..., :4], rotated(query[..., 4:])], -1)
    turned = jnp.broadcast_to(rotated(shared[:, :, None]), (B, T, H, 2))
    return query, jnp.concatenate([key, turned], axis=-1)


def _two_streams(p, x):
    """Image and text have kernels of their own and meet in the logits."""
    a, b = x[:, :2], x[:, 2:]
    query = jnp.concatenate([a @ p["a"]["q"], b @ p["b"]["q"]], 1)
    key = jnp.concatenate([a @ p["a"]["k"], b @ p["b"]["k"]], 1)
    return cut(query), cut(key)


def _zero_padded(p, x):
    query, key = _flat(p, x)
    return jnp.pad(query, ((0, 0),) * 3 + ((0, 2),)), jnp.pad(
        key, ((0, 0),) * 3 + ((0, 2),)
    )


FLAT = (D, H * DIM)
CASES = {
    "flat": Case({"q": FLAT, "k": FLAT}, _flat),
    "biased": Case({"q": FLAT, "k": FLAT, "bq": (H * DIM,), "bk": (H * DIM,)}, _biased),
    "einsum": Case({"q": (H, D, DIM), "kv": (2, H, D, DIM)}, _einsum),
    "fused": Case({"qkv": (D, 3 * H * DIM), "b": (3 * H * DIM,)}, _fused),
    "thirds": Case({"qkv": (D, 3 * H * DIM)}, _thirds),
    "interleaved": Case({"qkv": (D, 3 * H * DIM), "b": (3 * H * DIM,)}, _interleaved),
    "partly rotary": Case({"q": FLAT, "k": FLAT}, _partial),
    "rotary pairs": Case({"q": FLAT, "k": FLAT}, _pairs),
    "grouped": Case({"q": FLAT, "k": (D, 2 * DIM)}, _grouped),
    "multi-query": Case(
        {"q": FLAT, "k": (D, DIM)}, lambda p, x: (cut(x @ p["q"]), cut(x @ p["k"], 1))
    ),
    "transposed": Case({"q": FLAT[::-1], "k": FLAT[::-1]}, _transposed),
    "gains": Case({"q": FLAT, "k": FLAT, "gq": (DIM,), "gk": (DIM,)}, _gains),
    "gains of heads": Case(
        {"q": FLAT, "k": FLAT, "gq": (H, DIM), "gk": (H, DIM)}, _gains_of_heads
    ),
    "adapted": Case(
        {
            "q": FLAT,
            "k": FLAT,
            "qa": (D, 2),
            "qb": (2, H * DIM),
            "ka": (D, 2),
            "kb": (2, H * DIM),
        },
        _adapted,
    ),
    "latent": Case(
        {"q_a": (D, 7), "q_b": (7, H * 6), "kv_a": (D, 7), "kv_b": (5, H * 7)}, _latent
    ),
    "two streams": Case(
        {"a": {"q": FLAT, "k": FLAT}, "b": {"q": FLAT, "k": FLAT}}, _two_streams
    ),
    "padded": Case({"q": FLAT, "k": FLAT}, _zero_padded),
}

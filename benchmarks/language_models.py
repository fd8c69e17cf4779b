"""Language models in plain JAX: the shapes of their parameters, and their loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x.dtype) * gain


def rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 1e4 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of `(batch, length, heads, dim)`, in plain JAX."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e9))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return out.reshape(*out.shape[:2], -1)


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def gpt2(
    width: int,
    layers: int,
    heads: int,
    words: int,
    length: int,
    attend: Callable[..., jax.Array] = attend,
):
    """Shapes of a model with fused kernels and a tied embedding, and its loss."""
    layer = {
        "norm1": (width,),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "norm2": (width,),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    shapes: dict[str, Any] = {f"h{i}": dict(layer) for i in range(layers)}
    shapes |= {"wte": (words, width), "wpe": (length, width), "norm": (width,)}

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["wte"][tokens] + p["wpe"][: tokens.shape[1]]
        for i in range(layers):
            h = p[f"h{i}"]
            qkv = normed(x, h["norm1"]) @ h["qkv"]
            split = jnp.split(qkv.reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2)
            x = x + attend(*split) @ h["out"]
            x = x + jax.nn.gelu(normed(x, h["norm2"]) @ h["up"]) @ h["down"]
        return cross_entropy(normed(x, p["norm"]) @ p["wte"].T, tokens)

    return shapes, loss


def kimi_k2():
    """arXiv:2507.20534, table 2: latent attention, one dense layer, 60 of experts."""
    width, heads, nope, rope, hidden, experts = 7168, 64, 128, 64, 2048, 384
    attention = {
        "norm1": (width,),
        "q_a": (width, 1536),
        "q_norm": (1536,),
        "q_b": (1536, heads * (nope + rope)),
        "kv_a": (width, 512 + rope),
        "kv_norm": (512,),
        "kv_b": (512, heads * 2 * nope),
        "out": (heads * nope, width),
        "norm2": (width,),
    }
    dense = {"gate": (width, 18432), "up": (width, 18432), "down": (18432, width)}
    sparse = {
        "router": (width, experts),
        "experts_gate": (experts, width, hidden),
        "experts_up": (experts, width, hidden),
        "experts_down": (experts, hidden, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    stack = {name: (60, *shape) for name, shape in (attention | sparse).items()}
    shapes = {
        "embed": (163840, width),
        "first": attention | dense,
        "layers": stack,
        "norm": (width,),
        "lm_head": (width, 163840),
    }

    def latent(x: jax.Array, h: Any) -> jax.Array:
        y = normed(x, h["norm1"])
        query = normed(y @ h["q_a"], h["q_norm"]) @ h["q_b"]
        query = query.reshape(*x.shape[:2], heads, -1)
        low, shared = jnp.split(y @ h["kv_a"], [512], axis=-1)
        both = normed(low, h["kv_norm"]) @ h["kv_b"]
        key, value = jnp.split(both.reshape(*x.shape[:2], heads, -1), 2, axis=-1)
        turned = jnp.broadcast_to(
            rotated(shared[:, :, None]), (*x.shape[:2], heads, rope)
        )
        query = jnp.concatenate([query[..., :nope], rotated(query[..., nope:])], -1)
        return attend(query, jnp.concatenate([key, turned], -1), value) @ h["out"]

    def mlp(x: jax.Array, h: Any, start: str = "") -> jax.Array:
        gate = jax.nn.silu(x @ h[f"{start}gate"])
        return (gate * (x @ h[f"{start}up"])) @ h[f"{start}down"]

    def mixture(x: jax.Array, h: Any) -> jax.Array:
        flat = x.reshape(-1, width)
        weights, chosen = jax.lax.top_k(jax.nn.sigmoid(flat @ h["router"]), 8)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=experts)
        y = flat[order // 8]
        gate = jax.nn.silu(jax.lax.ragged_dot(y, h["experts_gate"], sizes))
        y = gate * jax.lax.ragged_dot(y, h["experts_up"], sizes)
        y = jax.lax.ragged_dot(y, h["experts_down"], sizes)
        y = y * weights.ravel()[order, None]
        return jnp.zeros_like(flat).at[order // 8].add(y).reshape(x.shape)

    def block(x: jax.Array, h: Any) -> tuple[jax.Array, None]:
        x = x + latent(x, h)
        y = normed(x, h["norm2"])
        return x + mixture(y, h) + mlp(y, h), None

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens]
        x = x + latent(x, p["first"])
        x = x + mlp(normed(x, p["first"]["norm2"]), p["first"])
        x, _ = jax.lax.scan(jax.checkpoint(block), x, p["layers"])
        return cross_entropy(normed(x, p["norm"]) @ p["lm_head"], tokens)

    return shapes, loss


def drawn(shapes: Any) -> Any:
    """Normal with GPT-2's deviation of 0.02, and gains of one."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [
        jnp.ones(shape) if len(shape) == 1 else 0.02 * jax.random.normal(key, shape)
        for key, shape in zip(keys, leaves, strict=True)
    ]
    return treedef.unflatten(values)

"""What `record_attention` costs a training step, and how long large models are read.

    python benchmarks/record_attention.py
    python benchmarks/record_attention.py --read

The step is AdamW's on a model in the manner of GPT-2, with the recorder and without;
the two take turns, and the ratio is the median over the pairs. Temporaries are those
that XLA plans. `--read` reads GPT-2 124M, Llama 1B and Kimi K2 from shapes alone, the
latter two with their layers scanned.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from alternating import alternate, ratios
from environment import environment

import muonclip_jax as mc


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
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
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


def llama_1b():
    """Llama 3.2 1B: 16 layers, scanned, 32 heads on 8 keys."""
    width, layers, heads, keys, dim, hidden = 2048, 16, 32, 8, 64, 8192
    layer = {
        "norm1": (width,),
        "q": (width, heads * dim),
        "k": (width, keys * dim),
        "v": (width, keys * dim),
        "out": (heads * dim, width),
        "norm2": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    stack = {name: (layers, *shape) for name, shape in layer.items()}
    shapes = {"embed": (128256, width), "layers": stack, "norm": (width,)}

    def block(x: jax.Array, h: Any) -> tuple[jax.Array, None]:
        y = normed(x, h["norm1"])
        q, k, v = ((y @ h[n]).reshape(*x.shape[:2], -1, dim) for n in "qkv")
        x = x + attend(rotated(q), rotated(k), v) @ h["out"]
        y = normed(x, h["norm2"])
        return x + (jax.nn.silu(y @ h["gate"]) * (y @ h["up"])) @ h["down"], None

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens]
        x, _ = jax.lax.scan(jax.checkpoint(block), x, p["layers"])
        return cross_entropy(normed(x, p["norm"]) @ p["embed"].T, tokens)

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


def made(shapes: Any, leaf: Callable[[tuple[int, ...]], Any]) -> Any:
    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def read() -> None:
    models = {
        "GPT-2 124M": (gpt2(768, 12, 12, 50257, 1024), 1024),
        "Llama 1B, scanned": (llama_1b(), 2048),
        "Kimi K2, scanned": (kimi_k2(), 4096),
    }
    for name, ((shapes, loss), length) in models.items():
        params = made(shapes, lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16))
        leaves = jax.tree.leaves(params)
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        start = time.perf_counter()
        reading = mc.read_model(loss, params, tokens)
        seconds = time.perf_counter() - start
        counts = {
            "billions of parameters": round(sum(x.size for x in leaves) / 1e9, 3),
            "leaves": len(leaves),
            "attention layers": len(reading.attention),
            "refused": len(reading.refused),
            "unknown": len(reading.unknown),
            "seconds": round(seconds, 2),
        }
        print(f"{name}:", ", ".join(f"{n} {word}" for word, n in counts.items()))


def step(args: argparse.Namespace) -> dict[str, Any]:
    shapes, loss = gpt2(args.width, args.layers, args.heads, args.words, args.length)
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def leaf(shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape)
        return jax.random.normal(next(keys), shape) * 0.02

    params = made(shapes, leaf)
    tokens = jax.random.randint(
        jax.random.key(1), (args.batch_size, args.length), 0, args.words
    )
    tx = optax.adamw(1e-4)
    state = tx.init(params)

    def without(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def recording(params: Any, state: Any, tokens: jax.Array) -> Any:
        both = jax.value_and_grad(mc.record_attention(loss), has_aux=True)
        (value, stats), grads = both(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, stats

    compiled: dict[str, Any] = {
        f.__name__: jax.jit(f).lower(params, state, tokens).compile()
        for f in (without, recording)
    }
    sides = {
        name: lambda run=run: run(params, state, tokens)
        for name, run in compiled.items()
    }
    times = alternate(sides, args.pairs)
    found: list[float] = sorted(ratios(times, "recording", "without"))
    mib = {
        name: run.memory_analysis().temp_size_in_bytes / (1 << 20)
        for name, run in compiled.items()
    }

    def cost(what: str) -> dict[str, float]:
        return {name: run.cost_analysis()[what] for name, run in compiled.items()}

    return {
        "seconds": {name: statistics.median(x) for name, x in times.items()},
        "ratio": statistics.median(found),
        "quartiles": [found[len(found) // 4], found[3 * len(found) // 4]],
        "temporaries_mib": mib,
        # Of the programs: what no other load on the machine changes.
        "operations": cost("flops"),
        "bytes": cost("bytes accessed"),
        "environment": environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--read", action="store_true", help="large models, from shapes")
    for name, default in {
        "width": 256,
        "layers": 4,
        "heads": 4,
        "words": 1024,
        "length": 256,
        "batch-size": 4,
        "pairs": 40,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.read:
        read()
    else:
        print(json.dumps(step(args), indent=2))


if __name__ == "__main__":
    main()

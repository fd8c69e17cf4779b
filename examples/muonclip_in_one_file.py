"""MuonClip on one screen, in JAX alone: Algorithm 1 of Kimi K2 (arXiv:2507.20534).

    python examples/muonclip_in_one_file.py

A transformer of two layers learns to write this file, byte by byte. `update` is all of
the optimizer: Muon for the matrices, AdamW for the rest, and QK-Clip. The package does
the same, for any model and sharded over any mesh: a test trains with both.
"""

import math
import pathlib

import jax
import jax.numpy as jnp


# The optimizer.

KELLER = (3.4445, -4.7750, 2.0315)  # kellerjordan.github.io/posts/muon
BETA, ADAM_B1, ADAM_B2, EPS, DECAY = 0.95, 0.9, 0.95, 1e-8, 0.1
MATRICES = ("query", "key", "value", "out", "up", "down")


def newton_schulz(x):
    """Keeps the singular vectors and sends all singular values near 1."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    a, b, c = KELLER
    x = x / jnp.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"count": 0, "momentum": zeros, "squares": zeros}


def update(params, state, grads, max_logits, rate, threshold):
    """New parameters and state; `max_logits` are those of each layer's heads."""
    count = state["count"] + 1
    new, momentum, squares = {}, {}, {}
    for name, w in params.items():
        g, m, v = grads[name], state["momentum"][name], state["squares"][name]
        if name.split("/")[-1] in MATRICES:
            m = BETA * m + g
            # As large an update as AdamW's: a root mean square of 0.2.
            direction = 0.2 * math.sqrt(max(w.shape)) * newton_schulz(m)
        else:
            m, v = ADAM_B1 * m + (1 - ADAM_B1) * g, ADAM_B2 * v + (1 - ADAM_B2) * g * g
            mean, square = m / (1 - ADAM_B1**count), v / (1 - ADAM_B2**count)
            direction = mean / (jnp.sqrt(square) + EPS)
        new[name] = w - rate * (direction + DECAY * w)
        momentum[name], squares[name] = m, v
    # QK-Clip: where the largest logit of a head is over the threshold, its query and
    # key are scaled after the step, so that the logit would have been at the threshold.
    for layer, largest in max_logits.items():
        gamma = jnp.where(largest > threshold, threshold / largest, 1.0)
        for side in ("query", "key"):
            kernel = new[f"{layer}/{side}"]
            each = jnp.repeat(jnp.sqrt(gamma), kernel.shape[1] // len(gamma))
            new[f"{layer}/{side}"] = kernel * each
    return new, {"count": count, "momentum": momentum, "squares": squares}


# A model to try it on.

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 128


def init_params(key):
    shapes = {"embed": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    for i in range(LAYERS):
        shapes |= {f"{i}/{name}": (WIDTH, WIDTH) for name in MATRICES[:4]}
        shapes |= {f"{i}/up": (WIDTH, 4 * WIDTH), f"{i}/down": (4 * WIDTH, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(key, shape) / math.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    gains = {f"{i}/{name}": jnp.ones(WIDTH) for i in range(LAYERS) for name in "ab"}
    return params | gains


def normalize(x, gain):
    return gain * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(x, query, key, value, out):
    """Attention, and the largest logit of every head."""
    batch, length, _ = x.shape
    q, k, v = ((x @ w).reshape(batch, length, HEADS, -1) for w in (query, key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
    return mixed.reshape(x.shape) @ out, logits.max(axis=(0, 2, 3))


def loss(params, tokens):
    x, max_logits = params["embed"][tokens[:, :-1]], {}
    for i in range(LAYERS):
        at = {name: params[f"{i}/{name}"] for name in (*MATRICES, "a", "b")}
        kernels = [at[name] for name in MATRICES[:4]]
        mixed, max_logits[str(i)] = attention(normalize(x, at["a"]), *kernels)
        x = x + mixed
        x = x + jax.nn.gelu(normalize(x, at["b"]) @ at["up"]) @ at["down"]
    logits = jax.nn.log_softmax(x @ params["head"])
    nats = -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    return nats.mean(), max_logits


@jax.jit
def train_step(params, state, tokens, rate, threshold):
    (value, max_logits), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens)
    params, state = update(params, state, grads, max_logits, rate, threshold)
    return params, state, value, max_logits


def batch_of(text, key, size=8, length=64):
    starts = jax.random.randint(key, (size,), 0, len(text) - length)
    return text[starts[:, None] + jnp.arange(length + 1)]


def main():
    text = jnp.frombuffer(pathlib.Path(__file__).read_bytes(), jnp.uint8).astype(int)
    params = init_params(jax.random.key(0))
    state = init(params)
    for i in range(201):
        tokens = batch_of(text, jax.random.key(i))
        params, state, value, max_logits = train_step(params, state, tokens, 0.01, 5.0)
        if i % 40 == 0:
            largest = max(float(x.max()) for x in max_logits.values())
            print(f"step {i:3}: loss {value:.3f}, largest logit {largest:.2f}")


if __name__ == "__main__":
    main()

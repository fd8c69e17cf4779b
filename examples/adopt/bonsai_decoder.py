"""A decoder in the style of jax-ml/bonsai's Qwen and Llama, trained with AdamW.

python examples/adopt/bonsai_decoder.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from text import batches, VOCABULARY


CONTEXT, WIDTH, LAYERS = 64, 64, 2
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 16


class Einsum(nnx.Module):
    def __init__(self, einsum_str: str, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.einsum_str = einsum_str
        self.w = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.einsum_str, x, self.w[...])


class RMSNorm(nnx.Module):
    def __init__(self, dim: int):
        self.scale = nnx.Param(jnp.ones(dim))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return self.scale[...] * x * jax.lax.rsqrt(mean + 1e-6)


def apply_rope(x: jax.Array) -> jax.Array:
    """Turns pairs of features of `(batch, length, heads, head_dim)` by position."""
    first, second = jnp.split(x, 2, axis=-1)
    frequency = 10_000.0 ** -jnp.linspace(0, 1, first.shape[-1], endpoint=False)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


class Attention(nnx.Module):
    """Causal attention whose queries share keys and values in groups."""

    def __init__(self, rngs: nnx.Rngs):
        key_shape = (WIDTH, KEY_HEADS, HEAD_DIM)
        self.q_proj = Einsum("BTD,DNH->BTNH", (WIDTH, HEADS, HEAD_DIM), rngs)
        self.k_proj = Einsum("BSD,DKH->BSKH", key_shape, rngs)
        self.v_proj = Einsum("BSD,DKH->BSKH", key_shape, rngs)
        self.o_proj = Einsum("BTNH,NHD->BTD", (HEADS, HEAD_DIM, WIDTH), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key = apply_rope(self.q_proj(x)), apply_rope(self.k_proj(x))
        heads = jax.nn.dot_product_attention(query, key, self.v_proj(x), is_causal=True)
        return self.o_proj(heads)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.gate_proj = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(WIDTH)
        self.attn = Attention(rngs)
        self.post_attention_layernorm = RMSNorm(WIDTH)
        self.mlp = MLP(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Logits of the next byte, `(batch, length)` to `(batch, length, VOCABULARY)`."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedder = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(rngs) for _ in range(LAYERS)])
        self.final_norm = RMSNorm(WIDTH)
        self.lm_head = Einsum("BTD,DV->BTV", (WIDTH, VOCABULARY), rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


def loss_fn(model: Decoder, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@nnx.jit
def train_step(
    model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1.2e-2)
    args = parser.parse_args()

    model = Decoder(nnx.Rngs(0))
    schedule = optax.linear_schedule(args.learning_rate, 0.0, args.steps)
    tx = optax.adamw(schedule)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [
        train_step(model, optimizer, jnp.asarray(tokens))
        for tokens in batches(args.steps, args.batch_size, CONTEXT)
    ]
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} (last 10 steps)")


if __name__ == "__main__":
    main()

"""A Linen Llama in the style of HuggingFace's Flax models, trained with AdamW.

python examples/adopt/huggingface_flax.py
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from text import batches, VOCABULARY


CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
HEAD_DIM = WIDTH // HEADS


def dense(features: int) -> nn.Dense:
    return nn.Dense(features, use_bias=False, kernel_init=nn.initializers.normal(0.02))


def rotary(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns pairs of features of `(batch, length, heads, HEAD_DIM)` by position."""
    frequency = 10_000.0 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    angle = jnp.arange(query.shape[1])[:, None, None] * jnp.tile(frequency, 2)

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        return x * jnp.cos(angle) + turned * jnp.sin(angle)

    return rotate(query), rotate(key)


class Attention(nn.Module):
    def setup(self) -> None:
        self.q_proj = dense(WIDTH)
        self.k_proj = dense(WIDTH)
        self.v_proj = dense(WIDTH)
        self.o_proj = dense(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = (
            projected.reshape(*x.shape[:2], HEADS, HEAD_DIM)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query, key = rotary(query, key)
        mask = nn.make_causal_mask(x[..., 0])
        heads = nn.dot_product_attention(query, key, value, mask=mask)
        return self.o_proj(heads.reshape(x.shape))


class MLP(nn.Module):
    def setup(self) -> None:
        self.gate_proj = dense(3 * WIDTH)
        self.up_proj = dense(3 * WIDTH)
        self.down_proj = dense(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def setup(self) -> None:
        self.input_layernorm = nn.RMSNorm()
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm()
        self.mlp = MLP()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nn.Module):
    """Logits of the next byte, `(batch, length)` to `(batch, length, VOCABULARY)`."""

    def setup(self) -> None:
        self.embed_tokens = nn.Embed(VOCABULARY, WIDTH)
        self.layers = [DecoderLayer() for _ in range(LAYERS)]
        self.norm = nn.RMSNorm()
        self.lm_head = dense(VOCABULARY)

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    logits: Any = LlamaForCausalLM().apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
    state = state.apply_gradients(grads=grads)
    return state, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    args = parser.parse_args()

    model = LlamaForCausalLM()
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    schedule = optax.linear_schedule(args.learning_rate, 0.0, args.steps)
    tx = optax.adamw(schedule)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for tokens in batches(args.steps, args.batch_size, CONTEXT):
        state, loss = train_step(state, jnp.asarray(tokens))
        losses.append(loss)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} (last 10 steps)")


if __name__ == "__main__":
    main()

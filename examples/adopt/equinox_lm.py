"""An Equinox language model of `eqx.nn.MultiheadAttention`, trained with AdamW.

python examples/adopt/equinox_lm.py
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from text import batches, VOCABULARY


CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Block(eqx.Module):
    """Pre-norm attention and a feed-forward network, on one sequence."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    attention_norm: eqx.nn.LayerNorm
    mlp_norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention_key)
        self.mlp = eqx.nn.MLP(
            WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=mlp_key
        )
        self.attention_norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp_norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
        x = x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))
        return x


class LanguageModel(eqx.Module):
    """Logits of the next byte, `(length,)` to `(length, VOCABULARY)`."""

    token_embedding: eqx.nn.Embedding
    position_embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        token, position, head, *blocks = jax.random.split(key, 3 + LAYERS)
        self.token_embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=token)
        self.position_embedding = eqx.nn.Embedding(CONTEXT, WIDTH, key=position)
        self.blocks = [Block(block) for block in blocks]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=head)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jax.vmap(self.position_embedding)(jnp.arange(len(tokens)))
        x = jax.vmap(self.token_embedding)(tokens) + positions
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss_fn(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@eqx.filter_jit
def train_step(
    model: LanguageModel,
    state: optax.OptState,
    tx: optax.GradientTransformationExtraArgs,
    tokens: jax.Array,
) -> tuple[LanguageModel, optax.OptState, jax.Array]:
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state = tx.update(grads, state, params)
    return eqx.apply_updates(model, updates), state, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1.2e-2)
    args = parser.parse_args()

    model = LanguageModel(jax.random.key(0))
    schedule = optax.linear_schedule(args.learning_rate, 0.0, args.steps)
    tx = optax.adamw(schedule)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for tokens in batches(args.steps, args.batch_size, CONTEXT):
        model, state, loss = train_step(model, state, tx, jnp.asarray(tokens))
        losses.append(loss)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} (last 10 steps)")


if __name__ == "__main__":
    main()

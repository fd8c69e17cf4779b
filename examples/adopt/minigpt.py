"""A small GPT in the style of Flax's NNX minigpt tutorial, trained with AdamW.

python examples/adopt/minigpt.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from text import batches, VOCABULARY


CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class TransformerBlock(nnx.Module):
    """Attention and a feed-forward network, each followed by a layer norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.mha = nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=WIDTH,
            decode=False,
            rngs=rngs,
        )
        self.layer_norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = self.layer_norm1(x + self.mha(x, mask=mask))
        return self.layer_norm2(x + self.linear2(nnx.relu(self.linear1(x))))


class TokenAndPositionEmbedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.token_emb = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.pos_emb = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.token_emb(tokens) + self.pos_emb(jnp.arange(tokens.shape[-1]))


class MiniGPT(nnx.Module):
    """Logits of the next byte, `(batch, length)` to `(batch, length, VOCABULARY)`."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding_layer = TokenAndPositionEmbedding(rngs)
        self.transformer_blocks = nnx.List(
            [TransformerBlock(rngs) for _ in range(LAYERS)]
        )
        self.output_layer = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding_layer(tokens)
        for block in self.transformer_blocks:
            x = block(x)
        return self.output_layer(x)


def loss_fn(model: MiniGPT, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@nnx.jit
def train_step(
    model: MiniGPT,
    optimizer: nnx.Optimizer,
    metrics: nnx.MultiMetric,
    tokens: jax.Array,
) -> None:
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    args = parser.parse_args()

    model = MiniGPT(nnx.Rngs(0))
    schedule = optax.linear_schedule(args.learning_rate, 0.0, args.steps)
    tx = optax.adamw(schedule)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    losses = []
    for tokens in batches(args.steps, args.batch_size, CONTEXT):
        train_step(model, optimizer, metrics, jnp.asarray(tokens))
        losses.append(metrics.compute()["loss"])
        metrics.reset()
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} (last 10 steps)")


if __name__ == "__main__":
    main()

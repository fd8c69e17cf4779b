"""A byte-level transformer of stock Flax NNX layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec


class Block(nnx.Module):
    """Pre-norm attention and a squared-ReLU feed-forward layer."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        y = jax.nn.relu(self.up(self.mlp_norm(x)))
        return x + self.down(jnp.square(y))


class Transformer(nnx.Module):
    """Logits of the next byte, `(batch, length)` to `(batch, length, vocabulary)`.

    `activations` is the sharding of the residual stream, over the mesh that is set.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int,
        layers: int,
        width: int,
        heads: int,
        rngs: nnx.Rngs,
        activations: PartitionSpec | None = None,
    ):
        self.activations = activations
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.position_embed = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = self.position_embed(jnp.arange(tokens.shape[-1]))
        x = self._place(self.embed(tokens) + positions)
        for block in self.blocks:
            x = self._place(block(x))
        return self.head(self.norm(x))

    def _place(self, x: jax.Array) -> jax.Array:
        if self.activations is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.activations)

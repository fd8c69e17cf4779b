"""Kimi K2's attention (arXiv:2412.19437, section 2.1.1), in miniature."""

import jax
import jax.numpy as jnp
from flax import nnx

import muonclip_jax as mc

from .layers import from_heads, linear, rotate, to_heads
from .run import Run


QUERY_RANK, KEY_VALUE_RANK = 48, 32
NOPE, ROPE = 32, 16  # features of a head without and with rotary embedding


class LatentAttention(nnx.Module):
    """Causal attention whose queries, keys and values come out of a low rank."""

    def __init__(self, run: Run, rngs: nnx.Rngs):
        width, heads = run.width, run.heads
        self.wq_a = linear(width, QUERY_RANK, rngs)
        self.q_norm = nnx.RMSNorm(QUERY_RANK, rngs=rngs)
        self.wq_b = to_heads(QUERY_RANK, heads, NOPE + ROPE, rngs)
        self.wkv_a = linear(width, KEY_VALUE_RANK + ROPE, rngs)
        self.kv_norm = nnx.RMSNorm(KEY_VALUE_RANK, rngs=rngs)
        self.wkv_b = to_heads(KEY_VALUE_RANK, heads, 2 * NOPE, rngs)
        self.out = from_heads(heads, NOPE, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, (key, value) = self.query(x), self.key_value(x)
        scale = query.shape[-1] ** -0.5
        stats = mc.max_logits(query, key, is_causal=True, scale=scale)
        self.sow(nnx.Intermediate, "max_logits", stats)
        # dot_product_attention takes only values as wide as the keys.
        value = jnp.pad(value, [(0, 0)] * 3 + [(0, ROPE)])
        y = jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True)
        return self.out(y[..., :NOPE])

    def query(self, x: jax.Array) -> jax.Array:
        """Returns `(batch, length, heads, NOPE + ROPE)`."""
        nope, rope = jnp.split(self.wq_b(self.q_norm(self.wq_a(x))), [NOPE], axis=-1)
        return jnp.concatenate([nope, rotate(rope)], axis=-1)

    def key_value(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys like the queries, and values `(batch, length, heads, NOPE)`."""
        latent, rope = jnp.split(self.wkv_a(x), [KEY_VALUE_RANK], axis=-1)
        nope, value = jnp.split(self.wkv_b(self.kv_norm(latent)), 2, axis=-1)
        shared = jnp.broadcast_to(
            rotate(rope[:, :, None]), (*nope.shape[:-1], ROPE)
        )  # by all heads
        return jnp.concatenate([nope, shared], axis=-1), value

"""Kimi K2's architecture in miniature, of stock Flax NNX layers where there are any.

Multi-head latent attention and a mixture of experts, after DeepSeek-V3
(arXiv:2412.19437) and Kimi K2 (arXiv:2507.20534, section 2.3).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Heads and feed-forward layers in Kimi K2's proportions; the ranks are higher.

    Kimi K2 has 61 layers of width 7168, 64 heads, and 8 of 384 experts per token.
    """

    vocabulary: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    query_rank: int = 48
    key_value_rank: int = 32
    nope_head_dim: int = 32  # of a head without rotary embedding; of a value too
    rope_head_dim: int = 16
    dense_hidden: int = 320
    expert_hidden: int = 32
    experts: int = 8
    experts_per_token: int = 2


class LatentAttention(nnx.Module):
    """Causal attention whose queries, keys and values come out of a low rank."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = s = sizes
        self.wq_a = linear(s.width, s.query_rank, rngs)
        self.q_norm = nnx.RMSNorm(s.query_rank, rngs=rngs)
        self.wq_b = up_projection(s, s.query_rank, s.rope_head_dim, rngs)
        self.wkv_a = linear(s.width, s.key_value_rank + s.rope_head_dim, rngs)
        self.kv_norm = nnx.RMSNorm(s.key_value_rank, rngs=rngs)
        self.wkv_b = up_projection(s, s.key_value_rank, s.nope_head_dim, rngs)
        self.out = nnx.LinearGeneral(
            (s.heads, s.nope_head_dim),
            s.width,
            axis=(-2, -1),
            use_bias=False,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        query, (key, value) = self.query(x), self.key_value(x)
        scale = query.shape[-1] ** -0.5
        # The value is padded since dot_product_attention wants it as wide as the key.
        rope = self.sizes.rope_head_dim
        value = jnp.pad(value, [(0, 0)] * 3 + [(0, rope)])
        y = jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True)
        return self.out(y[..., :-rope])

    def query(self, x: jax.Array) -> jax.Array:
        """Returns `(batch, length, heads, nope + rope)`."""
        query = self.wq_b(self.q_norm(self.wq_a(x)))
        nope, rope = jnp.split(query, [self.sizes.nope_head_dim], axis=-1)
        return jnp.concatenate([nope, rotate(rope)], axis=-1)

    def key_value(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys like the queries, and values `(batch, length, heads, nope)`."""
        latent, rope = jnp.split(self.wkv_a(x), [self.sizes.key_value_rank], axis=-1)
        both = self.wkv_b(self.kv_norm(latent))
        nope, value = jnp.split(both, [self.sizes.nope_head_dim], axis=-1)
        # All heads share one rotary key, which is why QK-Clip leaves it alone.
        rope = rotate(rope[:, :, None])
        rope = jnp.broadcast_to(rope, (*nope.shape[:-1], rope.shape[-1]))
        return jnp.concatenate([nope, rope], axis=-1), value


class SwiGLU(nnx.Module):
    """The gated feed-forward layer: a dense one, or one expert."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.gate = linear(width, hidden, rngs)
        self.up = linear(width, hidden, rngs)
        self.down = linear(hidden, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Balance(nnx.Variable):
    """What the router keeps and no gradient reaches."""


class Router(nnx.Module):
    """Weights of the experts, `(batch, length, experts)`, all but a few of them zero.

    A bias takes part in the choice alone. `balance` lowers it for experts that had
    more than their share of the last batch and raises it for the others, so that no
    auxiliary loss is needed (arXiv:2408.15664).
    """

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.chosen = sizes.experts_per_token
        self.scores = linear(sizes.width, sizes.experts, rngs)
        self.bias = Balance(jnp.zeros(sizes.experts))
        self.load = Balance(jnp.zeros(sizes.experts))  # in tokens

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = jax.nn.sigmoid(self.scores(x))
        _, best = jax.lax.top_k(scores + self.bias[...], self.chosen)
        selected = jax.nn.one_hot(best, scores.shape[-1]).sum(axis=-2)
        self.load[...] = selected.sum(axis=(0, 1))
        weights = scores * selected
        # The sum of several experts stays as large as one: Kimi K2 has 2.827 for 8.
        return self.chosen**0.5 * weights / weights.sum(axis=-1, keepdims=True)

    def balance(self, rate: float) -> None:
        load = self.load[...]
        # Without a division, so that a load that is just fair stays so.
        self.bias[...] += rate * jnp.sign(load.sum() - load.size * load)


class MixtureOfExperts(nnx.Module):
    """Routed experts and one that every token shares."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        def expert(rngs: nnx.Rngs) -> SwiGLU:
            return SwiGLU(sizes.width, sizes.expert_hidden, rngs)

        self.router = Router(sizes, rngs)
        self.experts = nnx.vmap(expert)(rngs.split(sizes.experts))
        self.shared = expert(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Every expert sees every token, and the weights drop most of what comes out:
        # at this size that costs less than sorting the tokens by expert.
        routed = nnx.vmap(SwiGLU.__call__, in_axes=(0, None))(self.experts, x)
        return self.shared(x) + jnp.einsum("e...d,...e->...d", routed, self.router(x))


class Block(nnx.Module):
    """Pre-norm attention and feed-forward layer."""

    def __init__(self, sizes: Sizes, dense: bool, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.attention = LatentAttention(sizes, rngs)
        self.mlp_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        if dense:
            self.mlp = SwiGLU(sizes.width, sizes.dense_hidden, rngs)
        else:
            self.mlp = MixtureOfExperts(sizes, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class KimiK2(nnx.Module):
    """Logits of the next token, `(batch, length)` to `(batch, length, vocabulary)`."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.sizes = sizes
        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
        self.blocks = nnx.List(
            [Block(sizes, i == 0, rngs) for i in range(sizes.layers)]
        )
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = linear(sizes.width, sizes.vocabulary, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def routers(self) -> list[Router]:
        mlps = [block.mlp for block in self.blocks]
        return [mlp.router for mlp in mlps if isinstance(mlp, MixtureOfExperts)]


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


def up_projection(
    sizes: Sizes, rank: int, past_nope: int, rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    """From a low rank to `(heads, nope + past_nope)`."""
    shape = (sizes.heads, sizes.nope_head_dim + past_nope)
    return nnx.LinearGeneral(rank, shape, use_bias=False, rngs=rngs)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding over the last axis of `(batch, length, heads, dim)`."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

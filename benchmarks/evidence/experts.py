"""Kimi K2's feed-forward layers in miniature: a mixture of gated experts."""

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import linear


HIDDEN, EXPERT_HIDDEN = 320, 32  # of the dense layer, of an expert
EXPERTS, CHOSEN = 8, 2


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
    """Weights `(batch, length, EXPERTS)`, all but `CHOSEN` of a token's zero.

    The bias takes part in the choice alone, and evens the load (arXiv:2408.15664).
    """

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.scores = linear(width, EXPERTS, rngs)
        self.bias = Balance(jnp.zeros(EXPERTS))
        self.load = Balance(jnp.zeros(EXPERTS))  # in tokens of the last batch

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = jax.nn.sigmoid(self.scores(x))
        _, best = jax.lax.top_k(scores + self.bias[...], CHOSEN)
        selected = jax.nn.one_hot(best, EXPERTS).sum(axis=-2)
        self.load[...] = selected.sum(axis=(0, 1))
        weights = scores * selected
        return CHOSEN**0.5 * weights / weights.sum(axis=-1, keepdims=True)

    def balance(self, rate: float) -> None:
        load = self.load[...]
        self.bias[...] += rate * jnp.sign(load.sum() - EXPERTS * load)


class MixtureOfExperts(nnx.Module):
    """Routed experts and one that every token shares."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        def expert(rngs: nnx.Rngs) -> SwiGLU:
            return SwiGLU(width, EXPERT_HIDDEN, rngs)

        self.router = Router(width, rngs)
        self.experts = nnx.vmap(expert)(rngs.split(EXPERTS))
        self.shared = expert(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # At this size all experts on all tokens cost less than sorting the tokens.
        routed = nnx.vmap(SwiGLU.__call__, in_axes=(0, None))(self.experts, x)
        return self.shared(x) + jnp.einsum("e...d,...e->...d", routed, self.router(x))


def balance(model: nnx.Module, rate: float) -> None:
    """Moves the biases of all routers, if the model has any."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Router):
            module.balance(rate)

"""The language model of examples/train_lm.py with a choice of attention, and its step.

It stands here again so that figures of the benchmarks do not move with the example.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from evidence.texts import VOCABULARY
from flax import nnx

import muonclip_jax as mc


class Settings(NamedTuple):
    """What a model is built from; `kernel` None is Flax's own attention."""

    layers: int
    width: int
    heads: int
    context: int
    dtype: str = "float32"
    kernel: Callable[..., Any] | None = None
    record: bool = True  # whether attention records its largest logits


class Block(nnx.Module):
    """Pre-norm attention and a squared-ReLU feed-forward layer."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        width, kernel = settings.width, settings.kernel
        common: dict[str, Any] = dict(dtype=jnp.dtype(settings.dtype), rngs=rngs)
        self.record = settings.record
        self.attention_norm = nnx.RMSNorm(width, **common)
        self.attention = nnx.MultiHeadAttention(
            settings.heads,
            width,
            decode=False,
            attention_fn=functools.partial(mc.attention_fn, kernel=kernel),
            **common,
        )
        self.mlp_norm = nnx.RMSNorm(width, **common)
        self.up = nnx.Linear(width, 4 * width, **common)
        self.down = nnx.Linear(4 * width, width, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention_norm(x)
        x = x + self.attention(y, is_causal=True, sow_weights=self.record)
        y = jax.nn.relu(self.up(self.mlp_norm(x)))
        return x + self.down(jnp.square(y))


class Transformer(nnx.Module):
    """Logits of the next byte, `(batch, length)` to `(batch, length, vocabulary)`."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        width, blocks = settings.width, range(settings.layers)
        common: dict[str, Any] = dict(dtype=jnp.dtype(settings.dtype), rngs=rngs)
        self.embed = nnx.Embed(VOCABULARY, width, **common)
        self.position_embed = nnx.Embed(settings.context, width, **common)
        self.blocks = nnx.List([Block(settings, rngs) for _ in blocks])
        self.norm = nnx.RMSNorm(width, **common)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, **common)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position_embed(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


State = tuple[Any, optax.OptState]  # parameters and the optimizer's


def start(
    settings: Settings, tx: optax.GradientTransformation
) -> tuple[nnx.GraphDef, State]:
    graph, params = nnx.split(Transformer(settings, nnx.Rngs(0)), nnx.Param)
    return graph, (params, tx.init(params))


def train_step(
    graph: nnx.GraphDef,
    tx: optax.GradientTransformation,
    state: State,
    tokens: jax.Array,
) -> tuple[State, tuple[jax.Array, Any]]:
    """Returns the state moved on, and the loss and statistics."""

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params)
        return nnx.capture(mean_loss, nnx.Intermediate)(model, tokens)

    params, opt_state = state
    outputs, grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), outputs


def mean_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of the next byte, in nats."""
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()

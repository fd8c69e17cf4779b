"""Flax's own layers, Linen and NNX, as its examples put them together."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from .models import Built, cross_entropy, floats, losses, Model, tokens


LIBRARIES = ("flax",)

KEY = jax.random.key(0)
DENSE = {"*": "-", "*/kernel": "i*o", "*head/kernel": "-"}
#: `DenseGeneral` from features to (heads, head_dim), and back.
HEADS = {f"*/{name}/kernel": "ioo" for name in ("query", "key", "value")}
HEADS |= {"*/out/kernel": "iio"}


def of_linen(net: nn.Module, *args: Any) -> Built:
    """State alongside the params, as batch statistics, is data."""
    variables = jax.eval_shape(net.init, KEY, *args)
    state = {k: v for k, v in variables.items() if k != "params"}
    state = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)

    def loss(params: Any, state: Any, *args: Any) -> jax.Array:
        variables = {"params": params, **state}
        out, _ = net.apply(variables, *args, mutable=list(state) or ["intermediates"])
        return cross_entropy(out)

    return Built(loss, variables["params"], (state, *args))


class Block(nn.Module):
    """A block before whose parts a norm stands."""

    is_masked: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0]) if self.is_masked else None
        y = nn.LayerNorm()(x)
        x += nn.MultiHeadDotProductAttention(4, **dict(self.options))(y, y, mask=mask)
        y = nn.Dense(64)(nn.LayerNorm()(x))
        return x + nn.Dense(32)(nn.gelu(y)), None


class LanguageModel(nn.Module):
    """As the example `lm1b`; with `scan` the layers are one, rematerialized."""

    scan: bool = False
    is_tied: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(99, 32)
        x = embed(ids)
        x += self.param("position", nn.initializers.normal(), (ids.shape[1], 32))
        if self.scan:
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = layers(options=self.options, name="layers")(x, None)
        else:
            for _ in range(2):
                x, _ = Block(options=self.options)(x)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.is_tied else nn.Dense(99, name="head")(x)


class VisionTransformer(nn.Module):
    """Patches by a convolution, a learned token whose row is classified."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (4, 4), (4, 4), padding="VALID", name="patches")(x)
        x = x.reshape(len(x), -1, 32)
        token = self.param("cls", nn.initializers.zeros, (1, 1, 32))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], 1)
        x += self.param("position", nn.initializers.normal(), (1, x.shape[1], 32))
        for _ in range(2):
            x, _ = Block(is_masked=False)(x)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x)[:, 0])


class ResNet(nn.Module):
    """As the example `imagenet`, of two blocks, with a depthwise convolution."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (7, 7), (2, 2), use_bias=False, name="stem")(x)
        x = nn.max_pool(nn.relu(self.norm()(x)), (3, 3), (2, 2), "SAME")
        for width in (16, 32):
            y = nn.Conv(width, (3, 3), use_bias=False)(x)
            y = nn.relu(self.norm()(y))
            y = nn.Conv(width, (3, 3), feature_group_count=width, name=f"dw{width}")(y)
            y = self.norm()(nn.Conv(width, (3, 3), feature_group_count=2)(y))
            x = nn.relu(y + nn.Conv(width, (1, 1), use_bias=False)(x))
        return nn.Dense(10, name="head")(x.mean((1, 2)))

    def norm(self) -> nn.Module:
        return nn.BatchNorm(use_running_average=False)


class Recurrent(nn.Module):
    """As the example `seq2seq`: an encoder and a decoder of LSTMs, and a GRU."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x: Any = nn.Embed(99, 32)(ids)
        carry, x = nn.RNN(nn.OptimizedLSTMCell(32), return_carry=True)(x)
        x = nn.RNN(nn.LSTMCell(32))(x, initial_carry=carry)
        x = nn.RNN(nn.GRUCell(32))(x)
        return nn.Dense(99, name="head")(x)


class VAE(nn.Module):
    """As the example `vae`: two outputs of the encoder, a decoder to pixels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.Dense(32, name="enc")(x))
        mean, log_var = nn.Dense(8, name="mean")(y), nn.Dense(8, name="log_var")(y)
        noise = jax.random.normal(KEY, mean.shape)
        z = mean + noise * jnp.exp(0.5 * log_var)
        return nn.Dense(20, name="head")(nn.relu(nn.Dense(32, name="dec")(z)))


class ActorCritic(nn.Module):
    """As the example `ppo`: frames to a policy and a value."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (8, 8), (4, 4), name="conv1")(x))
        x = nn.relu(nn.Conv(32, (3, 3), name="conv2")(x)).reshape(len(x), -1)
        x = nn.relu(nn.Dense(64, name="hidden")(x))
        logits = nn.log_softmax(nn.Dense(6, name="logits")(x))
        return logits + nn.Dense(1, name="value")(x)


def of_nnx(
    make: Callable[[nnx.Rngs], Any], call: Callable[..., Any], *args: Any
) -> Built:
    """`call(model, *args)` runs a copy of it, which may write to its state."""
    graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, *args: Any) -> jax.Array:
        return losses(call(nnx.merge(graph, params, rest, copy=True), *args))

    return Built(loss, params, (rest, *args))


def plain(model: Any, *args: Any) -> Any:
    return model(*args)


class Gated(nnx.Module):
    """Attention, a norm with statistics, dropout, a low-rank adapter, and a head."""

    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.embed = nnx.Embed(99, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, 32, decode=False, rngs=rngs, **options
        )
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.adapted = nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(32, 99, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + self.attention(self.norm(x))
        x = x + self.drop(self.down(self.adapted(nnx.gelu(self.up(x)))))
        return self.head(x)


class Stacked(nnx.Module):
    """Layers that `nnx.vmap` makes and `nnx.scan` runs."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)

        self.layers = make(rngs)
        self.embed = nnx.Embed(99, 32, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Any) -> jax.Array:
            return x + layer(x)

        return self.embed.attend(run(self.embed(ids), self.layers))


ATTENTION = DENSE | HEADS
LONG = tokens(2, 8)
NORMS = (("normalize_qk", True),)

MODELS = [
    Model(
        "Linen, language model",
        lambda: of_linen(LanguageModel(), LONG),
        ATTENTION,
        attention=2,
    ),
    Model(
        "Linen, scanned and rematerialized",
        lambda: of_linen(LanguageModel(scan=True, is_tied=True), LONG),
        ATTENTION
        | {k: f"s{v}" for k, v in HEADS.items()}
        | {"*/Dense_?/kernel": "sio"},
        attention=1,
    ),
    Model(
        "Linen, normalized query and key",
        lambda: of_linen(LanguageModel(options=NORMS), LONG),
        ATTENTION,
        attention=2,
        shares_gains=True,
    ),
    Model(
        "Linen, ViT",
        lambda: of_linen(VisionTransformer(), floats(2, 16, 16, 3)),
        ATTENTION | {"patches/kernel": "iiio|-"},
        attention=2,
    ),
    Model(
        "Linen, ResNet",
        lambda: of_linen(ResNet(), floats(2, 32, 32, 3)),
        DENSE | {"dw*/kernel": "-|iiio", "stem/kernel": "iiio|-"},
    ),
    Model("Linen, LSTM and GRU", lambda: of_linen(Recurrent(), LONG), DENSE),
    Model(
        "Linen, VAE",
        lambda: of_linen(VAE(), floats(2, 20)),
        DENSE | {"enc/kernel": "io|-"},
    ),
    Model(
        "Linen, actor and critic",
        lambda: of_linen(ActorCritic(), floats(2, 16, 16, 4)),
        DENSE | {"conv1/kernel": "iiio|-", "logits/kernel": "-", "value/kernel": "-"},
    ),
    Model(
        "NNX, attention, dropout, LoRA",
        lambda: of_nnx(Gated, plain, LONG),
        ATTENTION
        | {"*/lora/lora_a": "io|-", "*/lora/lora_b": "io|-", "*/lora_?": "io|-"},
        attention=1,
    ),
    Model(
        "NNX, scanned layers",
        lambda: of_nnx(Stacked, plain, LONG),
        ATTENTION | {k: f"s{v}" for k, v in HEADS.items()},
        attention=1,
    ),
]

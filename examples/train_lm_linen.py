"""The loop of train_lm.py in Linen, with `TrainState` and the function `clip_qk`.

    python examples/train_lm_linen.py

`TrainState.apply_gradients` passes no extra arguments on, so the clip follows it.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from corpus import Corpus, VOCABULARY
from flax.training.train_state import TrainState
from tqdm import trange

import muonclip_jax as mc


CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.RMSNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(y, y, mask=mask)
        y = jnp.square(nn.relu(nn.Dense(4 * WIDTH)(nn.RMSNorm()(x))))
        return x + nn.Dense(WIDTH)(y), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        positions = nn.Embed(CONTEXT, WIDTH)(jnp.arange(tokens.shape[-1]))
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + positions
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(nn.RMSNorm()(x))


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    logits: Any = Transformer().apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def make_step(reading: mc.ModelReading, threshold: float) -> Callable[..., Any]:
    gradient = jax.value_and_grad(mc.record_attention(loss_fn), has_aux=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, tokens: jax.Array):
        (loss, stats), grads = gradient(state.params, tokens)
        state = state.apply_gradients(grads=grads)
        params = mc.clip_qk(state.params, stats, threshold, model=reading)
        largest = functools.reduce(jnp.maximum, map(jnp.max, jax.tree.leaves(stats)))
        return state.replace(params=params), loss, largest

    return train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1.2e-2)
    parser.add_argument("--threshold", type=float, default=15.0)
    args = parser.parse_args()

    corpus, model = Corpus(), Transformer()
    tokens = jnp.zeros((1, CONTEXT + 1), jnp.int32)
    params = model.init(jax.random.key(0), tokens[:, 1:])["params"]
    reading = mc.read_model(loss_fn, params, tokens)
    print(reading)
    schedule = optax.linear_schedule(args.learning_rate, 0.0, args.steps)
    tx = mc.muon(schedule, model=reading)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    train_step = make_step(reading, args.threshold)

    loss = max_logit = jnp.nan
    for step in (bar := trange(args.steps)):
        tokens = corpus.batch(args.batch_size, CONTEXT, seed=0, step=step)
        state, loss, max_logit = train_step(state, jnp.asarray(tokens))
        if step % 10 == 0:
            bar.set_postfix_str(
                f"loss {loss:.3f}, max logit {max_logit:.1f}", refresh=False
            )
    print(f"final loss {loss:.3f}, max logit {max_logit:.1f}")


if __name__ == "__main__":
    main()

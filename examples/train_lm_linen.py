"""The loop of train_lm.py in Linen, with `TrainState` and the function `clip_qk`.

    python examples/train_lm_linen.py

`TrainState.apply_gradients` passes no extra arguments on, so the clip follows it.
"""

import argparse
import functools

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
        attention = nn.MultiHeadDotProductAttention(HEADS, attention_fn=mc.attention_fn)
        y = nn.RMSNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + attention(y, y, mask=mask, sow_weights=True)
        y = jnp.square(nn.relu(nn.Dense(4 * WIDTH)(nn.RMSNorm()(x))))
        return x + nn.Dense(WIDTH)(y), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        positions = nn.Embed(CONTEXT, WIDTH)(jnp.arange(tokens.shape[-1]))
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + positions
        layers = nn.scan(
            Block,
            # Without "intermediates" here the statistics of the layers are lost.
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(nn.RMSNorm()(x))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, tokens: jax.Array, threshold: float):
    def loss_fn(params):
        logits, recorded = state.apply_fn(
            {"params": params}, tokens[:, :-1], mutable=["intermediates"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), recorded["intermediates"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    state = state.replace(params=mc.clip_qk(state.params, stats, threshold))
    return (
        state,
        loss,
        jnp.max(stats["layers"]["MultiHeadDotProductAttention_0"]["max_logits"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-2)
    parser.add_argument("--threshold", type=float, default=15.0)
    args = parser.parse_args()

    corpus, model = Corpus(), Transformer()
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    print(mc.describe(params))
    schedule = optax.linear_schedule(args.learning_rate, 0.0, args.steps)
    tx = mc.muon(schedule, adam_learning_rate=lambda step: 0.3 * schedule(step))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    loss = max_logit = jnp.nan
    for step in (bar := trange(args.steps)):
        tokens = corpus.batch(args.batch_size, CONTEXT, seed=0, step=step)
        state, loss, max_logit = train_step(state, jnp.asarray(tokens), args.threshold)
        if step % 10 == 0:
            bar.set_postfix_str(
                f"loss {loss:.3f}, max logit {max_logit:.1f}", refresh=False
            )
    print(f"final loss {loss:.3f}, max logit {max_logit:.1f}")


if __name__ == "__main__":
    main()

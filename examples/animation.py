"""Draws `muonclip.gif`: Newton-Schulz and QK-Clip at work on a small language model.

    python examples/animation.py
    python examples/animation.py --tiny --out runs/tiny.gif   # a few seconds, to try it

Left, the singular values of a momentum of the training, after each step of
`mc.newton_schulz`; between two steps the picture interpolates. Right, the largest logit
of every head in every training step, with the clip and without it. Both runs start from
the same weights and see the same batches.
"""

import argparse
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from animation_frames import draw
from corpus import Corpus, VOCABULARY
from flax import nnx
from model import Transformer
from tqdm import trange
from train_lm_loop import loss_fn

import muonclip_jax as mc


NS_STEPS = 5
BATCH_SIZE, CONTEXT = 16, 64


class Settings(NamedTuple):
    steps: int = 200
    layers: int = 2
    width: int = 128
    heads: int = 4
    learning_rate: float = 2.4e-2
    threshold: float = 10.0
    frames: int = 80


TINY = Settings(steps=8, layers=1, width=16, threshold=1.0, frames=10)


class Training(NamedTuple):
    max_logits: np.ndarray  # shape=(steps, heads of all layers)
    momentum: jax.Array  # of the first block's `up`, at the end


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, few frames")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "muonclip.gif"
    )
    args = parser.parse_args()
    settings = TINY if args.tiny else Settings()
    corpus = Corpus()
    unclipped = train(settings, float("inf"), corpus)
    clipped = train(settings, settings.threshold, corpus)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(
        spectra(clipped.momentum),
        unclipped.max_logits,
        clipped.max_logits,
        args.out,
        threshold=settings.threshold,
        frames=settings.frames,
    )
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


def train(settings: Settings, threshold: float, corpus: Corpus) -> Training:
    """Trains with the logits held at `threshold`, or only watched if it is infinite."""
    model = Transformer(
        VOCABULARY,
        context=CONTEXT,
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        rngs=nnx.Rngs(0),
    )
    tokens = jnp.zeros((1, CONTEXT + 1), jnp.int32)
    tx = mc.muonclip(
        warmup(settings.learning_rate, settings.steps),
        threshold=threshold,
        model=mc.read_model(loss_fn, model, tokens),
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    max_logits = []
    for step in trange(settings.steps, desc=f"threshold {threshold:g}"):
        tokens = corpus.batch(BATCH_SIZE, CONTEXT, seed=0, step=step)
        max_logits.append(train_step(model, optimizer, jnp.asarray(tokens)))
    history = np.stack(jax.device_get(max_logits))
    return Training(history, last_momentum(optimizer))


def warmup(peak: float, steps: int) -> optax.Schedule:
    return optax.linear_schedule(0.0, peak, max(1, steps // 10))


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(
    model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array
) -> jax.Array:
    """Updates the model and returns the largest logit of every head."""
    gradient = nnx.grad(mc.record_attention(loss_fn), has_aux=True)
    grads, stats = gradient(model, tokens)
    optimizer.update(model, grads, attention_stats=stats)
    # A row of the heads of all layers.
    return optax.tree.get(optimizer.opt_state, "max_logits")[...]


def last_momentum(optimizer: nnx.Optimizer) -> jax.Array:
    def is_muon(x: Any) -> bool:
        return isinstance(x, mc.ScaleByMuonState)

    leaves = jax.tree.leaves(optimizer.opt_state, is_leaf=is_muon)
    (state,) = filter(is_muon, leaves)
    return state.mu["blocks"][0]["up"]["kernel"][...]


def spectra(momentum: jax.Array) -> np.ndarray:
    """Singular values after 0 to `NS_STEPS` steps, largest first in each row."""
    after = [
        mc.newton_schulz(momentum, steps=steps) for steps in range(1, NS_STEPS + 1)
    ]
    matrices = np.stack([momentum / jnp.linalg.norm(momentum), *after])
    return np.linalg.svd(matrices, compute_uv=False)


if __name__ == "__main__":
    main()

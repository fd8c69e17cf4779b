"""The language model of examples/train_lm.py, as the example builds and trains it."""

import argparse
import sys
from pathlib import Path
from unittest import mock


sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp
import optax
import train_lm
from flax import nnx


def settings() -> argparse.Namespace:
    """The example's own defaults."""
    with mock.patch.object(sys, "argv", ["train_lm.py"]):
        return train_lm.parse_args()


def tokens(args: argparse.Namespace, corpus: train_lm.Corpus, step: int) -> jax.Array:
    batch = corpus.batch(args.batch_size, args.context, seed=args.seed, step=step)
    return jnp.asarray(batch)


def trained_by(
    tx: optax.GradientTransformation, args: argparse.Namespace
) -> tuple[train_lm.Transformer, nnx.Optimizer]:
    """A fresh model and its optimizer, the arguments of `train_lm.train_step`."""
    model = train_lm.make_model(args)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

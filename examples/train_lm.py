"""Trains a byte-level transformer with MuonClip, Muon and AdamW on real text.

    python examples/train_lm.py                           # compare all three
    python examples/train_lm.py --optimizer muonclip --data book.txt --steps 1000
    python examples/train_lm.py --resume                  # go on after an interruption

Every optimizer sees the same initial weights and the same batches. Results go to
`--out`: checkpoints, `comparison.png` and `results.json`.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import Checkpoints
from corpus import Corpus, VOCABULARY
from flax import nnx
from model import Transformer
from report import draw, table
from tqdm import tqdm

import muonclip_jax as mc


OPTIMIZERS = ("adamw", "muon", "muonclip")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--optimizer", choices=OPTIMIZERS, help="train with this one alone")
    which.add_argument("--compare", action="store_true", help="train with all (default)")
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--data", type=Path, help="a text file; default: the standard library")
    add("--steps", type=int, default=300)
    add("--batch-size", type=int, default=32)
    add("--context", type=int, default=64)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--learning-rate", type=float, default=1e-2, help="Muon's; default: %(default)s")
    add("--adam-learning-rate", type=float, default=3e-3)
    add("--schedule", choices=("linear", "constant"), default="linear")
    add("--weight-decay", type=float, default=0.1)
    add("--threshold", type=float, default=30.0)
    add("--alpha", type=float, default=0.5)
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=10)
    add("--checkpoint-every", type=int, default=100)
    add("--out", type=Path, default=Path("runs/train_lm"))
    parser.add_argument("--resume", action="store_true", help="go on from --out")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    corpus = Corpus(args.data)
    print(f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out")
    chosen = [args.optimizer] if args.optimizer else list(OPTIMIZERS)
    results = {name: train(name, args, corpus) for name in chosen}
    print(table(results))
    draw(results, args.out / "comparison.png", threshold=args.threshold)
    (args.out / "results.json").write_text(json.dumps(results))
    print(f"picture: {args.out / 'comparison.png'}")


def make_optimizer(name: str, args: argparse.Namespace) -> optax.GradientTransformation:
    schedule = functools.partial(make_schedule, args)
    matrices, others = schedule(args.learning_rate), schedule(args.adam_learning_rate)
    if name == "adamw":
        return optax.adamw(others, b2=0.95, weight_decay=args.weight_decay)
    common: dict[str, Any] = dict(
        adam_learning_rate=others, weight_decay=args.weight_decay
    )
    if name == "muon":
        return mc.muon(matrices, **common)
    return mc.muonclip(matrices, threshold=args.threshold, alpha=args.alpha, **common)


def make_schedule(args: argparse.Namespace, peak: float) -> optax.Schedule:
    warmup = min(20, args.steps // 2)
    end = peak if args.schedule == "constant" else 0.0
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / warmup if warmup else peak, peak, warmup),
            optax.linear_schedule(peak, end, max(1, args.steps - warmup)),
        ],
        [warmup],
    )


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


class Metrics(NamedTuple):
    loss: jax.Array
    max_logit: jax.Array
    clipped: jax.Array


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array) -> Metrics:
    # nnx.capture returns what mc.attention_fn recorded beside the loss.
    recorded_loss = nnx.capture(loss_fn, nnx.Intermediate)
    gradient = nnx.value_and_grad(recorded_loss, has_aux=True)
    (loss, stats), grads = gradient(model, tokens)
    optimizer.update(model, grads, attention_stats=stats)
    max_logit = functools.reduce(jnp.maximum, map(jnp.max, jax.tree.leaves(stats)))
    clipped = optax.tree.get(optimizer.opt_state, "num_clipped", jnp.zeros((), jnp.int32))
    return Metrics(loss, max_logit, jnp.asarray(clipped))


@nnx.jit
def evaluate(model: Transformer, tokens: jax.Array) -> jax.Array:
    loss, _ = nnx.capture(loss_fn, nnx.Intermediate)(model, tokens)
    return loss


def train(name: str, args: argparse.Namespace, corpus: Corpus) -> list[dict[str, Any]]:
    """Trains with one optimizer and returns a record per evaluation."""
    model = Transformer(
        VOCABULARY,
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        rngs=nnx.Rngs(args.seed),
    )
    optimizer = nnx.Optimizer(model, make_optimizer(name, args), wrt=nnx.Param)
    with Checkpoints(args.out / name, settings(args), resume=args.resume) as checkpoints:
        first, history = checkpoints.restore(model, optimizer)
        run = Run(model, optimizer, args, corpus, history)
        for step in (bar := tqdm(range(first, args.steps), initial=first, total=args.steps, desc=name)):
            bar.set_postfix_str(run.advance(step))
            if run.is_due(step + 1, args.checkpoint_every):
                checkpoints.save(step + 1, model, optimizer, run.history)
    return run.history


class Run:
    """One training run: what happens at a step, and what is remembered of it."""

    def __init__(self, model, optimizer, args, corpus: Corpus, history: list):
        self.model, self.optimizer, self.args, self.corpus = model, optimizer, args, corpus
        self.history = history
        self._validation = [
            jnp.asarray(batch)
            for batch in corpus.validation_batches(8, args.batch_size, args.context)
        ]
        self._pending: list[Metrics] = []
        self._started = time.perf_counter()
        self._shown = ""

    def advance(self, step: int) -> str:
        """Takes one step and returns the line beside the progress bar."""
        args = self.args
        tokens = self.corpus.batch(args.batch_size, args.context, seed=args.seed, step=step)
        self._pending.append(train_step(self.model, self.optimizer, jnp.asarray(tokens)))
        if self.is_due(step + 1, args.eval_every):
            self._record(step + 1)
        return self._shown

    def is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.args.steps

    def _record(self, step: int) -> None:
        metrics = Metrics(*map(np.asarray, zip(*jax.device_get(self._pending), strict=True)))
        elapsed = time.perf_counter() - self._started
        losses = [float(evaluate(self.model, batch)) for batch in self._validation]
        self.history.append(
            {
                "step": step,
                "loss": float(metrics.loss.mean()),
                "validation_loss": float(np.mean(losses)),
                "max_logit": float(metrics.max_logit.max()),
                "clipped": int(metrics.clipped.sum()),
                "tokens_per_second": self._tokens() / elapsed,
            }
        )
        self._pending, self._started = [], time.perf_counter()
        self._shown = "loss {loss:.3f}, max logit {max_logit:.1f}, clipped {clipped}".format(
            **self.history[-1]
        )

    def _tokens(self) -> int:
        return len(self._pending) * self.args.batch_size * self.args.context


def settings(args: argparse.Namespace) -> dict[str, str]:
    """What a resumed run must have in common with the one it continues."""
    free = {"resume", "out", "compare", "optimizer", "checkpoint_every"}
    return {k: str(v) for k, v in vars(args).items() if k not in free}


if __name__ == "__main__":
    main()

"""Trains a byte-level transformer with Muon, MuonClip and AdamW on real text.

    python examples/train_lm.py                           # compare all three
    python examples/train_lm.py --quick                   # the same in 60 steps
    python examples/train_lm.py --optimizer muonclip --data book.txt --steps 1000
    python examples/train_lm.py --resume                  # go on after an interruption

Every optimizer sees the same initial weights and the same batches. Results go to
`--out`: checkpoints, `comparison.png` and `results.json`.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import Checkpoints
from corpus import Corpus, existing_file, VOCABULARY
from flax import nnx
from model import Transformer
from tqdm import tqdm
from train_lm_report import draw, History, NAMES, summary, table

import muonclip_jax as mc


OPTIMIZERS = ("muon", "muonclip", "adamw")
BAR = "{desc} {percentage:3.0f} %|{bar}| {remaining} left{postfix}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="train with this one alone"
    )
    which.add_argument(
        "--compare", action="store_true", help="train with all (default)"
    )
    add_training_arguments(parser)
    parser.add_argument(
        "--quick",
        dest="steps",
        action="store_const",
        const=60,
        help="60 steps, with the rates that are tuned for 300",
    )
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--eval-every", type=int, default=10)
    add(
        "--checkpoint-every",
        type=int,
        default=5,
        help="in evaluations; default: %(default)s",
    )
    add("--out", type=Path, default=Path("runs/train_lm"))
    parser.add_argument("--resume", action="store_true", help="go on from --out")
    return parser.parse_args()


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--data", type=existing_file, help="a text file; default: the standard library")
    add("--steps", type=int, default=300)
    add("--batch-size", type=int, default=32)
    add("--context", type=int, default=64)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add(
        "--learning-rate", type=float, default=2e-2, help="Muon's; default: %(default)s"
    )
    add("--adam-learning-rate", type=float, default=6e-3)
    add("--schedule", choices=("linear", "constant"), default="linear")
    add("--weight-decay", type=float, default=0.5)
    add("--threshold", type=float, default=8.0)
    add("--alpha", type=float, default=0.5)
    add("--seed", type=int, default=0)


def main() -> None:
    args = parse_args()
    print(f"reading {args.data or 'the sources of the standard library'}", flush=True)
    corpus = Corpus(args.data)
    print(
        f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out"
    )
    chosen = [args.optimizer] if args.optimizer else list(OPTIMIZERS)
    results = {}
    with tqdm(total=len(chosen) * args.steps, bar_format=BAR, smoothing=0) as bar:
        for i, name in enumerate(chosen, 1):
            bar.set_description_str(f"{NAMES[name]} ({i} of {len(chosen)})")
            bar.set_postfix_str("compiling")
            results[name] = train(name, args, corpus, bar)
    picture = args.out / "comparison.png"
    rates = {name: float(args.learning_rate) for name in OPTIMIZERS}
    rates["adamw"] = args.adam_learning_rate
    draw(results, picture, threshold=args.threshold, rates=rates)
    (args.out / "results.json").write_text(json.dumps(results))
    params = nnx.state(make_model(args), nnx.Param)
    print(f"\nWhich parameters Muon updated:\n\n{mc.describe(params)}\n")
    print(table(results), summary(results, threshold=args.threshold), sep="\n")
    print(f"picture: {picture}")


def make_optimizer(
    name: str, args: argparse.Namespace, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """`options` are further arguments of `mc.muonclip`."""
    schedule = functools.partial(make_schedule, args)
    matrices, others = schedule(args.learning_rate), schedule(args.adam_learning_rate)
    if name == "adamw":
        adamw = optax.adamw(others, b2=0.95, weight_decay=args.weight_decay)
        return optax.with_extra_args_support(adamw)
    common: dict[str, Any] = dict(
        adam_learning_rate=others, weight_decay=args.weight_decay
    )
    if name == "muon":
        return mc.muon(matrices, **common)
    clip = dict(threshold=args.threshold, alpha=args.alpha)
    return mc.muonclip(matrices, **clip, **common, **options)


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
    loss: Any
    max_logit: Any
    clipped: Any


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(
    model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array
) -> Metrics:
    # nnx.capture returns what mc.attention_fn recorded next to the loss.
    recorded_loss = nnx.capture(loss_fn, nnx.Intermediate)
    gradient = nnx.value_and_grad(recorded_loss, has_aux=True)
    (loss, stats), grads = gradient(model, tokens)
    optimizer.update(model, grads, attention_stats=stats)
    max_logit = functools.reduce(jnp.maximum, map(jnp.max, jax.tree.leaves(stats)))
    clipped = optax.tree.get(
        optimizer.opt_state, "num_clipped", jnp.zeros((), jnp.int32)
    )
    return Metrics(loss, max_logit, jnp.asarray(clipped))


@nnx.jit
def evaluate(model: Transformer, tokens: jax.Array) -> jax.Array:
    loss, _ = nnx.capture(loss_fn, nnx.Intermediate)(model, tokens)
    return loss


def train(name: str, args: argparse.Namespace, corpus: Corpus, bar: tqdm) -> History:
    """Trains with one optimizer and returns a record per evaluation."""
    model = make_model(args)
    optimizer = nnx.Optimizer(model, make_optimizer(name, args), wrt=nnx.Param)
    validation = corpus.validation_batches(8, args.batch_size, args.context)
    folder = args.out / name
    with Checkpoints(folder, settings(args), resume=args.resume) as checkpoints:
        first, history = restore(checkpoints, model, optimizer)
        bar.total -= first  # what a resumed run has done already takes no time
        pending, started = [], time.perf_counter()
        for step in range(first, args.steps):
            tokens = corpus.batch(
                args.batch_size, args.context, seed=args.seed, step=step
            )
            pending.append(train_step(model, optimizer, jnp.asarray(tokens)))
            bar.update()
            last = step + 1 == args.steps
            if last or (step + 1) % args.eval_every == 0:
                record = summarize(pending, tokens[:, 1:].size, started)
                record |= {
                    "step": step + 1,
                    "validation_loss": validate(model, validation),
                }
                history.append(record)
                bar.set_postfix_str(progress(record), refresh=False)
                if last or len(history) % args.checkpoint_every == 0:
                    checkpoints.save(step + 1, pure(model, optimizer), history)
                pending, started = [], time.perf_counter()
    return history


def restore(
    checkpoints: Checkpoints, model: Transformer, optimizer: nnx.Optimizer
) -> tuple[int, History]:
    """Loads the newest checkpoint in place; returns its step and history."""
    saved = checkpoints.restore(pure(model, optimizer))
    if saved is None:
        return 0, []
    nnx.update(model, saved.state["model"])
    nnx.update(optimizer, saved.state["optimizer"])
    return saved.step, saved.history


def pure(model: Transformer, optimizer: nnx.Optimizer) -> dict[str, Any]:
    return {
        "model": nnx.to_pure_dict(nnx.state(model)),
        "optimizer": nnx.to_pure_dict(nnx.state(optimizer)),
    }


def make_model(args: argparse.Namespace, **options: Any) -> Transformer:
    return Transformer(
        VOCABULARY,
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        rngs=nnx.Rngs(args.seed),
        **options,
    )


def summarize(pending: list[Metrics], tokens: int, started: float) -> dict[str, Any]:
    """Waits for the steps since the last evaluation and folds their metrics."""
    loss, max_logit, clipped = np.asarray(jax.device_get(pending), np.float64).T
    elapsed = time.perf_counter() - started
    return {
        "loss": loss.mean(),
        "max_logit": max_logit.max(),
        "clipped": int(clipped.sum()),
        "tokens_per_second": len(pending) * tokens / elapsed,
    }


def validate(model: Transformer, batches: list[np.ndarray]) -> float:
    return float(np.mean([evaluate(model, jnp.asarray(batch)) for batch in batches]))


def progress(record: dict[str, Any]) -> str:
    line = "validation loss {validation_loss:.3f}, largest logit {max_logit:.1f}"
    return line.format(**record)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """What a resumed run must have in common with the one it continues."""
    free = {"resume", "out", "compare", "optimizer", "checkpoint_every"}
    return {k: str(v) for k, v in vars(args).items() if k not in free}


if __name__ == "__main__":
    main()

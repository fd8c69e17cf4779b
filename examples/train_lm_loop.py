"""The comparison of train_lm.py, and the training loop of each optimizer."""

import argparse
import contextlib
import functools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import Checkpoints, move_aside, saved_step
from corpus import Corpus, VOCABULARY
from flax import nnx
from model import Transformer
from tqdm import tqdm
from train_lm_options import OPTIMIZERS
from train_lm_report import draw, groups, History, in_terminal, NAMES, summary, table

import muonclip_jax as mc


BAR = "{desc} {percentage:3.0f} %|{bar}| {remaining} left{postfix}"


def compare(args: argparse.Namespace, chosen: Sequence[str]) -> None:
    """Trains with each optimizer in turn, then draws and prints the results."""
    print(f"reading {args.data or 'the sources of the standard library'}", flush=True)
    corpus = Corpus(args.data)
    print(
        f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out"
    )
    results = {}
    picture, numbers = args.out / "comparison.png", args.out / "results.json"
    steps = dict.fromkeys(chosen, 0)
    if args.resume:
        if not any((args.out / name).exists() for name in chosen):
            raise SystemExit(f"nothing to resume in {args.out}: no run has begun there")
        steps = saved_steps(args, chosen)
        print(f"going on. {describe(steps, args.steps)}", flush=True)
    else:
        # As `Checkpoints` does: a second run leaves the first one's files.
        move_aside(picture)
        move_aside(numbers)
    left = sum(args.steps - n for n in steps.values())
    with tqdm(total=left, bar_format=BAR, smoothing=0) as bar:
        for i, name in enumerate(chosen, 1):
            bar.set_description_str(f"{NAMES[name]} ({i} of {len(chosen)})")
            results[name] = train(name, args, corpus, bar)
    rates = {name: float(args.learning_rate) for name in OPTIMIZERS}
    rates["adamw"] = args.adam_learning_rate
    draw(results, picture, threshold=args.threshold, rates=rates)
    numbers.write_text(json.dumps(results))
    print(f"\n{groups(mc.param_labels(make_model(args), model=read(args)))}\n")
    said = summary(results, threshold=args.threshold)
    print(table(results), *map(in_terminal, said.splitlines()), sep="\n")
    print(f"picture: {picture}")


def saved_steps(args: argparse.Namespace, chosen: Sequence[str]) -> dict[str, int]:
    """Returns the step of the newest finished checkpoint of each optimizer, or 0."""
    return {name: saved_step(args.out / name) for name in chosen}


def describe(steps: dict[str, int], last: int) -> str:
    """Says at which step each optimizer's newest checkpoint is."""
    said = {0: "nothing is saved", last: "done"}
    places = (
        f"{x}: {said.get(n, f'saved at step {n} of {last}')}" for x, n in steps.items()
    )
    return ", ".join(places)


def make_optimizer(
    name: str, args: argparse.Namespace, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """`options` are further arguments of `mc.muonclip`."""
    schedule = functools.partial(make_schedule, args)
    if name == "adamw":
        rate = schedule(args.adam_learning_rate)
        adamw = optax.adamw(rate, b2=0.95, weight_decay=args.weight_decay)
        return optax.with_extra_args_support(adamw)
    rate = schedule(args.learning_rate)
    options |= dict(model=read(args), weight_decay=args.weight_decay)
    if name == "muon":
        return mc.muon(rate, **options)
    clip = dict(threshold=args.threshold, alpha=args.alpha)
    return mc.muonclip(rate, **clip, **options)


def read(args: argparse.Namespace) -> mc.ModelReading:
    """What `loss_fn` does with every parameter, by its trace on shapes alone."""
    model = nnx.eval_shape(functools.partial(make_model, args))
    return mc.read_model(loss_fn, model, jnp.zeros((1, args.context + 1), jnp.int32))


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
    gradient = nnx.value_and_grad(mc.record_attention(loss_fn), has_aux=True)
    (loss, stats), grads = gradient(model, tokens)
    optimizer.update(model, grads, attention_stats=stats)
    max_logit = functools.reduce(jnp.maximum, map(jnp.max, jax.tree.leaves(stats)))
    clipped = optax.tree.get(
        optimizer.opt_state, "num_clipped", jnp.zeros((), jnp.int32)
    )
    return Metrics(loss, max_logit, jnp.asarray(clipped))


@nnx.jit
def evaluate(model: Transformer, tokens: jax.Array) -> jax.Array:
    return loss_fn(model, tokens)


def train(name: str, args: argparse.Namespace, corpus: Corpus, bar: tqdm) -> History:
    """Trains with one optimizer and returns a record per evaluation."""
    model = make_model(args)
    optimizer = nnx.Optimizer(model, make_optimizer(name, args), wrt=nnx.Param)
    validation = corpus.validation_batches(8, args.batch_size, args.context)
    folder = args.out / name
    with Checkpoints(folder, settings(args), resume=args.resume) as checkpoints:
        first, history = restore(checkpoints, model, optimizer)
        pending, started, saved = [], time.perf_counter(), first
        for step in range(first, args.steps):
            tokens = corpus.batch(
                args.batch_size, args.context, seed=args.seed, step=step
            )
            with compiling(bar) if step == first else contextlib.nullcontext():
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
                if last or step + 1 - saved >= args.checkpoint_every:
                    checkpoints.save(step + 1, pure(model, optimizer), history)
                    saved = step + 1
                pending, started = [], time.perf_counter()
    return history


@contextlib.contextmanager
def compiling(bar: tqdm) -> Iterator[None]:
    """Counts the seconds of the first step, which the time left leaves out."""
    is_done, started = threading.Event(), time.perf_counter()

    def show() -> None:
        while not is_done.wait(0.5):
            seconds = time.perf_counter() - started
            bar.set_postfix_str(f"compiling, {seconds:.0f} s")

    clock = threading.Thread(target=show, daemon=True)
    clock.start()
    try:
        yield
    finally:
        is_done.set()
        clock.join()
        bar.set_postfix_str("", refresh=False)
        bar.unpause()


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

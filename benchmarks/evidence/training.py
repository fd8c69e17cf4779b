"""Trains a model as a run says, and returns what an experiment may ask of it."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .adapters import adapted, draw_adapters
from .experts import balance
from .model import largest_logits, Transformer
from .optimizers import clip, Hyperparameters, hyperparameters, make_optimizer
from .run import Run
from .texts import Text, text


PARTS = ("tune", "report")
HELD_OUT = 32768  # bytes of each part
BALANCE_RATE = 1e-2


class Carry(NamedTuple):
    params: Any
    optimizer: Any
    others: Any  # what the model keeps alongside its params


Weights = tuple[Any, Any]  # params, and the rest of the model


class Program(NamedTuple):
    """The compiled functions that runs of one shape share."""

    init: Callable[..., Carry]  # key, weights unless they are drawn
    step: Callable[..., tuple[Carry, jax.Array, jax.Array]]  # carry, tokens, at
    evaluate: Callable[..., jax.Array]  # carry, batches of tokens


class History(NamedTuple):
    """The losses and logits of a run, step by step."""

    losses: list[jax.Array]
    logits: list[jax.Array]  # of every layer and head
    curve: list[tuple[float, ...]]  # step and the losses of the held-out parts
    forgotten: list[float]  # losses on the text of the run before: then, and at the end
    weights: Weights


def train(run: Run) -> dict[str, Any]:
    """Returns losses in nats per byte and the largest logits."""
    started = time.perf_counter()
    result = result_of(run, history_of(run))
    seconds = round(time.perf_counter() - started, 1)
    return result | {"seconds": seconds, "text": text(run.corpus).digest}


def history_of(run: Run) -> History:
    """Trains, until the end or until the loss is no longer finite."""
    source, compiled = text(run.corpus), program(run.program)
    held_out = [batches(source, part, run) for part in PARTS]
    before = run.before
    carry = compiled.init(jax.random.key(run.seed), before and weights_of(before))
    losses, logits, curve = [], [], []
    old = [batches(text(before.corpus), "report", before)] if before else []
    forgotten = [float(compiled.evaluate(carry, part)) for part in old]
    for i, at in enumerate(hyperparameters(run)):
        tokens = source.batch(run.batch, run.context, run.seed, i)
        carry, loss, largest = compiled.step(carry, tokens, at)
        losses.append(loss)
        logits.append(largest)
        if evaluates(run, i):
            ends = [float(compiled.evaluate(carry, part)) for part in held_out]
            curve.append((i + 1, *ends))
            if not np.isfinite(ends).all():
                break
    forgotten += [float(compiled.evaluate(carry, part)) for part in old]
    weights = jax.device_get((carry.params, carry.others))
    return History(losses, logits, curve, forgotten, weights)


@functools.lru_cache(maxsize=64)
def weights_of(run: Run) -> Weights:
    """What a run trained, on the host, so that steps may take copies over."""
    return history_of(run).weights


def result_of(run: Run, history: History) -> dict[str, Any]:
    logits = np.stack(jax.device_get(history.logits))  # (steps, layers, heads)
    result: dict[str, Any] = {
        "curve": [[step, *map(rounded, ends)] for step, *ends in history.curve],
        "peak": rounded(np.nanmax(logits)),
        "fired": int((logits > run.threshold).sum()),
    }
    if history.forgotten:
        result["forgotten"] = [rounded(x) for x in history.forgotten]
    if run.probe == "steps":
        result["losses"] = [rounded(x) for x in jax.device_get(history.losses)]
        result["logits"] = [rounded(x) for x in logits.max(axis=(1, 2))]
    if run.probe == "losses":  # a thousandth is a hundredth of what is a spike
        result["losses"] = [round(float(x), 3) for x in jax.device_get(history.losses)]
    return result


def evaluates(run: Run, i: int) -> bool:
    """Whether the run looks at the held-out text after step i: at equal intervals."""
    return (i + 1) * run.evaluations % run.steps < run.evaluations


def batches(source: Text, part: str, run: Run) -> jax.Array:
    """Held-out windows, `(count, batch, context + 1)`."""
    count = max(1, HELD_OUT // (run.batch * run.context))
    windows = source.held_out(part, count * run.batch, run.context)
    return jnp.asarray(windows.reshape(count, run.batch, -1))


@functools.lru_cache(maxsize=16)
def program(run: Run) -> Program:
    """Compiles; `run` is the `program` of a run, for the rest are arguments."""
    abstract = nnx.eval_shape(lambda: Transformer(run, nnx.Rngs(0)))
    graph, _, _ = nnx.split(abstract, nnx.Param, ...)

    @jax.jit  # alone, since drawing is what compiles longest, and many runs share it
    def draw(key: jax.Array):
        return nnx.split(Transformer(run, nnx.Rngs(key)), nnx.Param, ...)[1:]

    @jax.jit
    def start(params: Any) -> Any:
        tx = make_optimizer(run, hyperparameters(run)[0])
        return tx.init(params)

    def init(key: jax.Array, weights: Weights | None = None) -> Carry:
        params, others = weights or draw(key)
        if run.rank:
            params, others = draw_adapters(key, params, run.rank), (params, others)
        return Carry(params, start(params), others)

    def loss_fn(params: Any, others: Any, tokens: jax.Array):
        if run.rank:
            base, rest = others
            loss, (stats, rest) = loss_of(adapted(base, params), rest, tokens)
            return loss, (stats, (base, rest))
        return loss_of(params, others, tokens)

    def loss_of(params: Any, others: Any, tokens: jax.Array):
        # Fresh variables, since those of an outer trace must not be written to.
        params, others = jax.tree.map(jnp.asarray, (params, others))
        model = nnx.merge(graph, params, others)
        loss, stats = nnx.capture(mean_loss, nnx.Intermediate)(model, tokens)
        balance(model, BALANCE_RATE)
        return loss, (stats, nnx.split(model, nnx.Param, ...)[2])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Carry, tokens: jax.Array, at: Hyperparameters):
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (stats, others)), grads = gradient(carry.params, carry.others, tokens)
        tx = make_optimizer(run, at)
        updates, state = tx.update(grads, carry.optimizer, carry.params)
        params = clip(run, optax.apply_updates(carry.params, updates), stats, at)
        return Carry(params, state, others), loss, largest_logits(stats)

    @jax.jit
    def evaluate(carry: Carry, tokens: jax.Array) -> jax.Array:
        def one(batch):
            return loss_fn(carry.params, carry.others, batch)[0]

        return jax.lax.map(one, tokens).mean()

    return Program(init, step, evaluate)


def mean_loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def rounded(x: Any) -> float:
    return float(f"{float(x):.5g}")

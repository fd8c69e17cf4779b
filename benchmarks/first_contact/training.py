"""GPT-2 124M, trained for some steps by AdamW, optax's Muon and MuonClip.

Parameters are float32, activations bfloat16, and on GPU the attention is cuDNN's.
MuonClip reads the model and records its logits. A token is two bytes, modulo the size
of GPT-2's vocabulary, so that a step costs what GPT-2's does.

The share of an optimizer is what its step takes longer than the gradient alone.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from evidence.texts import text
from language_models import drawn, gpt2
from optax.contrib import MuonDimensionNumbers
from optax_main import as_on_main

import muonclip_jax as mc

from .rounding import platform


class Model(NamedTuple):
    layers: int
    width: int
    heads: int
    words: int
    context: int
    batch: int
    steps: int


GPT2 = Model(12, 768, 12, 50304, 1024, batch=16, steps=60)
TINY_GPT2 = Model(2, 32, 2, 256, 16, batch=2, steps=3)
TRAINED = {
    "step": "",
    "loss": ".3f",
    "median, ms": ".2f",
    "longer than the gradient, ms": ".2f",
    "share": ".1%",
    "memory as planned, GB": ".2f",
    "largest logit": ".3g",
}
RATE, WARMUP = 1e-3, 10
SCHEDULE = optax.linear_schedule(RATE / WARMUP, RATE, WARMUP)
UPDATE = "the_update"  # the scope of an optimizer's part of a step


class Trained(NamedTuple):
    """One row of the table."""

    name: str
    loss: float | None = None
    ms: float | None = None
    longer: float | None = None
    share: float | None = None
    planned: float | None = None
    largest: float | None = None


class Optimizer(NamedTuple):
    tx: Any
    records: bool  # whether it is given the largest logits


def trained(model: Model) -> Iterator[Trained]:
    """The gradient alone and with recorded logits, then each optimizer's step."""
    alone = gradient_row(model, records=False)
    yield alone
    yield longer_than(alone, gradient_row(model, records=True))
    for name, optimizer in optimizers(model).items():
        yield longer_than(alone, step_row(model, name, optimizer))


def longer_than(alone: Trained, row: Trained) -> Trained:
    assert alone.ms and row.ms
    longer = row.ms - alone.ms
    return row._replace(longer=longer, share=longer / row.ms)


def gradient_row(model: Model, records: bool) -> Trained:
    params = drawn(shapes_and_loss(model)[0])
    compiled = (
        jax.jit(gradient(model, records)).lower(params, batch(model, 0)).compile()
    )
    seconds = [timed(compiled, params, batch(model, i))[0] for i in range(model.steps)]
    name = "gradient alone" + records * ", with record_attention"
    return Trained(name, ms=median_ms(seconds), planned=gigabytes(compiled))


def step_row(model: Model, name: str, optimizer: Optimizer) -> Trained:
    return row_of_steps(model, name, *compiled_step(model, optimizer))


def compiled_step(model: Model, optimizer: Optimizer) -> tuple[Any, Any]:
    """One training step, which uses up what it is given, and the optimizer's init."""

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, stats, grads = gradient(model, optimizer.records)(params, tokens)
        given = {"attention_stats": stats} if optimizer.records else {}
        with jax.named_scope(UPDATE):
            updates, state = optimizer.tx.update(grads, state, params, **given)
            params = optax.apply_updates(params, updates)
        return params, state, loss, stats

    init = jax.jit(optimizer.tx.init)
    params = jax.eval_shape(lambda: drawn(shapes_and_loss(model)[0]))
    program = jax.jit(step, donate_argnums=(0, 1))
    lowered = program.lower(params, jax.eval_shape(init, params), batch(model, 0))
    return lowered.compile(), init


def row_of_steps(model: Model, name: str, compiled: Any, init: Any) -> Trained:
    params = drawn(shapes_and_loss(model)[0])
    state = init(params)
    seconds, loss, largest = [], math.nan, None
    for i in range(model.steps):
        taken, (params, state, loss, stats) = timed(
            compiled, params, state, batch(model, i)
        )
        seconds.append(taken)
        largest = max((float(x.max()) for x in jax.tree.leaves(stats)), default=None)
    planned = gigabytes(compiled)
    return Trained(
        name, float(loss), median_ms(seconds), planned=planned, largest=largest
    )


def timed(compiled: Any, *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    results = jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start, results


def median_ms(seconds: list[float]) -> float:
    """Without the first, which loads the program."""
    return 1e3 * statistics.median(seconds[1:])


def gigabytes(compiled: Any) -> float:
    """The planned memory of arguments, new results and temporaries."""
    plan = compiled.memory_analysis()
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return (plan.argument_size_in_bytes + results + plan.temp_size_in_bytes) / 1e9


def muonclip(model: Model, **options: Any) -> Optimizer:
    return Optimizer(mc.muonclip(SCHEDULE, model=reading(model), **options), True)


@functools.cache
def reading(model: Model) -> Any:
    return mc.read_model(
        functools.partial(loss_of, model),
        jax.eval_shape(lambda: drawn(shapes_and_loss(model)[0])),
        jax.eval_shape(lambda: batch(model, 0)),
    )


def optimizers(model: Model) -> dict[str, Optimizer]:
    params = jax.eval_shape(lambda: drawn(shapes_and_loss(model)[0]))
    numbers = {
        name: jax.tree.map(
            lambda leaf: MuonDimensionNumbers() if leaf.ndim == 2 else None, part
        )
        if name.startswith("h")
        else None
        for name, part in params.items()
    }
    theirs = optax.contrib.muon(
        SCHEDULE,
        consistent_rms=0.2,
        weight_decay=0.1,
        adam_weight_decay=0.1,
        muon_weight_dimension_numbers=numbers,
    )
    adamw = optax.adamw(SCHEDULE, 0.9, 0.95, weight_decay=0.1)
    return {
        "optax.adamw": Optimizer(adamw, False),
        "mc.muon": Optimizer(mc.muon(SCHEDULE, model=reading(model)), False),
        "mc.muonclip": muonclip(model),
        "optax.contrib.muon of the main branch": Optimizer(as_on_main(theirs), False),
    }


def gradient(model: Model, records: bool) -> Callable[..., Any]:
    """From params and tokens to the loss, statistics and the gradient."""
    loss = functools.partial(loss_of, model)

    def with_gradient(params: Any, tokens: jax.Array) -> Any:
        recorded = mc.record_attention(loss) if records else lambda *x: (loss(*x), {})
        outputs = jax.value_and_grad(recorded, has_aux=True)(params, tokens)
        (value, stats), grads = outputs
        return value, stats, grads

    return with_gradient


def loss_of(model: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """The mean loss of the next token of `(batch, context)`."""
    _, loss = shapes_and_loss(model)
    return loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens)


def shapes_and_loss(model: Model) -> tuple[Any, Callable[..., jax.Array]]:
    layers, width, heads, words, context, *_ = model
    return gpt2(width, layers, heads, words, context, attend=by_kernel)


def by_kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention by cuDNN's kernel on GPU."""
    kernel = "cudnn" if platform() == "gpu" else "xla"
    out = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=kernel
    )
    return out.reshape(*out.shape[:2], -1)


def batch(model: Model, step: int) -> jax.Array:
    """Tokens of two bytes, `(batch, context)`."""
    pairs = text("code").batch(model.batch, 2 * model.context - 1, 0, step)
    first, second = pairs[:, ::2], pairs[:, 1::2]
    return jnp.asarray((256 * first + second) % model.words)

"""What `record_attention` costs a training step, in time and memory, by length.

    python benchmarks/attention_statistics.py

Each row compares AdamW's step on a small GPT-2 with the largest logits recorded to the
step without, for an attention that forms all logits and for the blockwise one. The two
take turns, and the ratio is the median over neighbors. Temporaries and bytes accessed
are those that XLA plans; a step that needs more temporaries than `--memory` is not
timed.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import optax
from alternating import alternate, ratio
from language_models import attend, drawn, gpt2
from tables import parser, Report

import muonclip_jax as mc


COLUMNS = {
    "attention": "",
    "length": "d",
    "ms without": ".1f",
    "ms with": ".1f",
    "with / without": ".3f",
    "bytes accessed": ".3f",
    "MiB without": ".0f",
    "MiB with": ".0f",
}
WORDS, RATE = 256, 1e-3


def main() -> None:
    options = parser(__doc__)
    add = functools.partial(options.add_argument, help="default: %(default)s")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    add("--layers", type=int, default=2)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--repeats", type=int, default=7)
    add("--memory", type=float, default=6, help="GiB; default: %(default)s")
    args = options.parse_args()
    report = Report(args)
    title = f"One step of {args.layers} layers of width {args.width}, one sequence"
    table = report.table(title, COLUMNS)
    for name, attention in ATTENTIONS.items():
        for length in args.lengths:
            table.add(name, length, *figures(attention, length, args))
    report.write()


def blockwise(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    out, _ = mc.blockwise_attention(query, key, value, is_causal=True)
    return out.reshape(*out.shape[:2], -1)


ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "all logits": attend,
    "blockwise": blockwise,
}


def figures(
    attention: Callable[..., jax.Array], length: int, args: argparse.Namespace
) -> list[float | None]:
    """The cells of a row after the first two."""
    shapes, loss = gpt2(args.width, args.layers, args.heads, WORDS, length, attention)
    programs, inputs = steps(shapes, loss, length)
    plans = [program.memory_analysis() for program in programs.values()]
    mib = [plan.temp_size_in_bytes / 2**20 for plan in plans]
    without, recording = (
        x.cost_analysis()["bytes accessed"] for x in programs.values()
    )
    plan = [recording / without, *mib]
    if max(mib) > 1024 * args.memory:
        return [None, None, None, *plan]
    sides = {k: functools.partial(run, *inputs) for k, run in programs.items()}
    times = alternate(sides, args.repeats)
    ms = [1e3 * statistics.median(times[name]) for name in programs]
    return [*ms, ratio(times, "with", "without"), *plan]


def steps(
    shapes: Any, loss: Callable[..., jax.Array], length: int
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The compiled steps without and with recording, and the inputs of both."""
    params, tx = drawn(shapes), optax.adamw(RATE)
    tokens = jax.random.randint(jax.random.key(1), (1, length), 0, WORDS)
    inputs = (params, tx.init(params), tokens)

    def compiled(loss: Callable[..., Any]) -> Any:
        def step(params: Any, state: Any, tokens: jax.Array) -> Any:
            gradient = jax.value_and_grad(loss, has_aux=True)
            outputs, grads = gradient(params, tokens)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, outputs

        return jax.jit(step).lower(*inputs).compile()

    def alone(params: Any, tokens: jax.Array) -> tuple[jax.Array, None]:
        return loss(params, tokens), None

    sides = {"without": alone, "with": mc.record_attention(loss)}
    return {name: compiled(side) for name, side in sides.items()}, inputs


if __name__ == "__main__":
    main()

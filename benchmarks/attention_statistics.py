"""What the attention statistic costs a training step, in time and memory, by length.

    python benchmarks/attention_statistics.py

Each row compares one training step with the statistic returned to the one without,
for the attention that materialises its logits, and the blockwise one.
The two steps take turns, and the ratio is the median over the pairs, so that other
load on the machine moves both. Temporaries are those that XLA plans for the step.
"""

import argparse
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from environment import environment
from evidence.texts import VOCABULARY
from flax import nnx
from language_model import Settings, start, train_step

import muonclip_jax as mc


MIB = 1 << 20
NAMES = ["materialised", "blockwise"]


class Variant(NamedTuple):
    """An attention without and with its statistic; `None` is Flax's own."""

    without: Callable[..., Any] | None
    recording: Callable[..., Any] | None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = jax.default_backend() == "gpu"
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    add("--variants", nargs="+", choices=NAMES, default=NAMES)
    add("--batch-size", type=int, default=1)
    add("--layers", type=int, default=2)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--dtype", default="bfloat16" if gpu else "float32")
    add("--pairs", type=int, default=100, help="at most; default: %(default)s")
    add("--least-pairs", type=int, default=5)
    add("--seconds", type=float, default=30, help="per row; default: %(default)s")
    add(
        "--memory",
        type=float,
        default=6,
        help="GiB of temporaries; skip what needs more",
    )
    add("--out", type=Path, help="a JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    print(f"{environment()}; load {load()}\n{describe(args)}\n")
    print(HEADER, flush=True)
    rows = []
    for name in args.variants:
        for length in args.lengths:
            rows.append(measure(name, length, args))
            print(line(rows[-1]), flush=True)
    print(f"\n{growth(rows)}")
    minutes = (time.perf_counter() - started) / 60
    print(f"\n{minutes:.1f} minutes, load afterwards {load()}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(dict(environment=environment(), rows=rows)))


def load() -> str:
    """Says how busy the machine was in the last 1 and 5 minutes."""
    one, five, _ = os.getloadavg()
    return f"{one:.1f}, {five:.1f}"


def describe(args: argparse.Namespace) -> str:
    return (
        f"{args.layers} layers of width {args.width}, {args.heads} heads, batch "
        f"{args.batch_size}, {args.dtype}, causal"
    )


def variants() -> dict[str, Variant]:
    return dict(
        materialised=Variant(None, None),
        # It computes the statistic in any case, and without drops it.
        blockwise=Variant(mc.blockwise_attention, mc.blockwise_attention),
    )


OPTIMIZER = optax.adamw(1e-3)


class Step:
    """A compiled training step and the state that it moves on."""

    def __init__(
        self,
        settings: Settings,
        batch_size: int,
        optimizer: optax.GradientTransformation = OPTIMIZER,
    ):
        self._optimizer = optimizer
        graph, self._shapes = nnx.eval_shape(lambda: start(settings, optimizer))
        self._tokens = random_tokens(batch_size, settings.context)
        step = functools.partial(train_step, graph, optimizer)
        jitted = jax.jit(step, donate_argnums=0)
        self._compiled = jitted.lower(self._shapes, self._tokens).compile()
        self.temporaries = temporaries(self._compiled)

    def start(self, warm_up: int = 2) -> None:
        """Draws weights as large as at the usual start, without a compilation."""
        generator = np.random.default_rng(0)

        def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
            values = generator.normal(size=x.shape, scale=(x.shape or (1,))[0] ** -0.5)
            return jnp.asarray(values, x.dtype)

        params = jax.tree.map(draw, self._shapes[0])
        self._state = (params, self._optimizer.init(params))
        for _ in range(warm_up):
            self.seconds()

    def seconds(self) -> float:
        """Trains one step and returns the time that it took."""
        jax.block_until_ready(self._state)
        started = time.perf_counter()
        self._state, outputs = self._compiled(self._state, self._tokens)
        jax.block_until_ready((self._state, outputs))
        return time.perf_counter() - started


def temporaries(compiled: Any) -> float:
    """MiB; nan where the backend does not tell."""
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes / MIB if analysis else math.nan


def random_tokens(batch_size: int, length: int) -> jax.Array:
    generator = np.random.default_rng(0)
    return jnp.asarray(generator.integers(0, VOCABULARY, (batch_size, length + 1)))


def measure(name: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table; without times if the step needs too much memory."""
    variant = variants()[name]
    model = Settings(args.layers, args.width, args.heads, length, args.dtype)
    without, recording = (
        Step(model._replace(kernel=kernel, record=record), args.batch_size)
        for kernel, record in zip(variant, (False, True), strict=True)
    )
    row: dict[str, Any] = dict(
        variant=name,
        length=length,
        memory_without=without.temporaries,
        memory_with=recording.temporaries,
    )
    if max(without.temporaries, recording.temporaries) > args.memory * 1024:
        return row
    return row | timings(without, recording, args)


def timings(without: Step, recording: Step, args: argparse.Namespace) -> dict[str, Any]:
    """Lets the two steps take turns, each first in every other pair."""
    without.start()
    recording.start()
    pairs, started = [], time.perf_counter()
    while len(pairs) < args.pairs and (
        len(pairs) < args.least_pairs or time.perf_counter() - started < args.seconds
    ):
        if len(pairs) % 2:
            after = recording.seconds()
            pairs.append((without.seconds(), after))
        else:
            pairs.append((without.seconds(), recording.seconds()))
    times = np.asarray(pairs)
    low, ratio, high = np.quantile(times[:, 1] / times[:, 0], (0.25, 0.5, 0.75))
    milliseconds = 1e3 * np.median(times, axis=0)
    return dict(
        pairs=len(pairs),
        time_without=milliseconds[0],
        time_with=milliseconds[1],
        ratio=ratio,
        ratio_quartiles=[low, high],
    )


HEADER = """\
| attention | length | ms without | ms with | ratio (quartiles), pairs | \
MiB without | MiB with |
|---|---|---|---|---|---|---|"""


def line(row: dict[str, Any]) -> str:
    if "ratio" in row:
        low, high = row["ratio_quartiles"]
        spread = f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}), {row['pairs']}"
        times = [f"{row['time_without']:.1f}", f"{row['time_with']:.1f}", spread]
    else:
        times = ["-", "-", "not run: more than --memory"]
    memory = [f"{row[key]:.1f}" for key in ("memory_without", "memory_with")]
    return f"| {' | '.join([row['variant'], str(row['length']), *times, *memory])} |"


def growth(rows: list[dict[str, Any]]) -> str:
    """Says by which power of the length the temporaries grow: 1 is linear."""
    lines = ["growth of the temporaries with the statistic:"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = [
            (row["length"], row["memory_with"])
            for row in rows
            if row["variant"] == name
        ]
        lines.append(f"- {name}: {', '.join(factors(points)) or '-'}")
    return "\n".join(lines)


def factors(points: Iterable[tuple[int, float]]) -> list[str]:
    ordered = sorted(points)
    return [
        f"{n} to {m} x{y / x:.2f} (power {math.log(y / x) / math.log(m / n):.2f})"
        for (n, x), (m, y) in itertools.pairwise(ordered)
    ]


if __name__ == "__main__":
    main()

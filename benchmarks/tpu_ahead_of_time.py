"""Compiles Muon's update for one TPU chip, without a TPU: ours and optax's.

    pip install -e '.[examples]' 'jax[tpu]'
    TPU_WORKER_HOSTNAMES=localhost JAX_PLATFORMS=cpu \\
        python benchmarks/tpu_ahead_of_time.py

Arithmetic, memory and cycles are what the TPU compiler plans and estimates for one
update in float32. Nothing runs, so none of it is a time; the seconds are those of
tracing and compiling here.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from attention_ahead_of_time import one_chip
from gpt2 import BLOCK, optimizers, Shapes
from hlo_costs import Costs, hlo_costs
from jax.sharding import Sharding
from pictures import picture
from tables import parser, Report, Table


LLAMA_BLOCK: Shapes = (
    {name: (2048, 2048) for name in ("query", "out")}
    | {name: (2048, 512) for name in ("key", "value")}
    | {name: (2048, 8192) for name in ("gate", "up")}
    | {"down": (8192, 2048)}
)


@dataclass(frozen=True)
class Compiled:
    """One update of a preset, as compiled; `bytes` are those of one chip."""

    preset: str
    implementation: str
    costs: Costs
    temporary_bytes: int
    argument_bytes: int
    seconds: float


COLUMNS = {
    "update": "",
    "by": "",
    "GFLOP": ",.0f",
    "Mcycles": ".2f",
    "of optax's": ".2f",
    "temporaries, MB": ",.0f",
    "arguments, MB": ",.0f",
    "trace and compile, s": ".1f",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--topology", default="v5p:2x2x1")
    options.add_argument("--layers", type=int, default=4, help="of Llama-1B's 16")
    options.add_argument("--png", type=Path, help="a picture of the cycles")
    args = options.parse_args()
    report = Report(args)
    title = f"One update, compiled for one chip of {args.topology}"
    table = report.table(title, COLUMNS)
    chip = one_chip(args.topology)
    updates = []
    for preset, shapes in presets(args.layers).items():
        pair = list(compile_updates(preset, shapes, chip))
        add_rows(table, pair)
        updates += pair
    report.write()
    if args.png:
        draw(args.png, args.topology, updates)


def presets(llama_layers: int) -> dict[str, Shapes]:
    models = {
        "GPT-2 124M": (12, BLOCK),
        f"Llama-1B, {llama_layers} layers": (llama_layers, LLAMA_BLOCK),
    }
    leaves = {}
    for model, (layers, block) in models.items():
        leaves[f"{model}, separate"] = {
            f"{i}/{name}": shape for i in range(layers) for name, shape in block.items()
        }
        leaves[f"{model}, stacked"] = {
            name: (layers, *shape) for name, shape in block.items()
        }
    return leaves


def arguments(
    tx: optax.GradientTransformation, shapes: Shapes, chip: Sharding
) -> tuple[Any, Any, Any]:
    """Gradients, state and parameters by shape, dtype and sharding: all on one chip."""
    params = {name: jax.ShapeDtypeStruct(v, jnp.float32) for name, v in shapes.items()}
    state = jax.eval_shape(tx.init, params)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip),
        (params, state, params),
    )


def compile_updates(preset: str, shapes: Shapes, chip: Sharding) -> Iterator[Compiled]:
    for implementation, tx in optimizers(shapes).items():
        inputs = arguments(tx, shapes, chip)
        jax.clear_caches()
        start = time.perf_counter()
        compiled = jax.jit(tx.update).lower(*inputs).compile()
        seconds = time.perf_counter() - start
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None  # as on other backends
        yield Compiled(
            preset,
            implementation,
            hlo_costs(text),
            memory.temp_size_in_bytes,
            memory.argument_size_in_bytes,
            seconds,
        )


def add_rows(table: Table, updates: list[Compiled]) -> None:
    (optax_cycles,) = (u.costs.cycles for u in updates if u.implementation == "optax")
    for update in updates:
        table.add(
            update.preset,
            update.implementation,
            update.costs.flops / 1e9,
            update.costs.cycles / 1e6,
            update.costs.cycles / optax_cycles,
            update.temporary_bytes / 1e6,
            update.argument_bytes / 1e6,
            update.seconds,
        )


def draw(file: Path, topology: str, updates: list[Compiled]) -> None:
    places = {preset: i for i, preset in enumerate(_distinct(updates, "preset"))}
    label = f"Mcycles of one update, estimated, one chip of {topology}"
    with picture(file, xlabel=label) as axes:
        for name, offset in {"ours": -0.2, "optax": 0.2}.items():
            mine = [update for update in updates if update.implementation == name]
            bars = axes.barh(
                [places[update.preset] + offset for update in mine],
                [update.costs.cycles / 1e6 for update in mine],
                height=0.4,
                label=name,
            )
            axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.set_yticks(range(len(places)), list(places))
        axes.invert_yaxis()


def _distinct(updates: list[Compiled], field: str) -> list[str]:
    return list(dict.fromkeys(getattr(update, field) for update in updates))


if __name__ == "__main__":
    main()

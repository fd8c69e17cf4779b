"""Processor time to trace and compile Muon's update, and its temporaries in XLA's plan.

    python benchmarks/compilation.py

For 72 leaves, GPT-2 124M's hidden matrices, and for 336, those of 56 such layers. The
same update without orthogonalization, momentum with weight decay, is the floor: it
reads and returns the same arrays. All take turns. "optax" is its main branch
(`optax_main.py`). `--only ours momentum` leaves the others out, `--stacked` has the
layers in stacks. `--trace --layers 5 20 80 320` only traces `init` and the update, for
16 leaves a layer, 6 of them matrices; `--only ours adamw` compares with AdamW.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import optax
from gpt2 import BLOCK, optimizers, separate, Shapes, stacked
from optax_main import RELEASED
from tables import parser, Report


SIDES = ("ours", "optax", RELEASED, "momentum")
VECTORS = (*(f"{name} bias" for name in BLOCK), "scale", "shift", "scale 2", "shift 2")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, nargs="+", default=[12, 56])
    options.add_argument("--stacked", action="store_true", help="leaves of all layers")
    options.add_argument("--trace", action="store_true", help="compile nothing")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--only", nargs="+", default=SIDES)
    args = options.parse_args()
    report = Report(args)
    columns = {"leaves": "d", "": "", "CPU s": ".2f", "temporaries, MB": ".0f"}
    table = report.table("Trace and compile", columns)
    for layers in args.layers:
        block = BLOCK | dict.fromkeys(VECTORS, (768,)) if args.trace else BLOCK
        shapes = (stacked if args.stacked else separate)(layers, block)
        vectors = [name for name, shape in shapes.items() if shape == (768,)]
        known = optimizers(shapes, adam=vectors) | {
            "momentum": momentum(),
            "adamw": optax.adamw(1e-3),
        }
        sides = {name: known[name] for name in args.only}
        measure = trace if args.trace else compile_update
        runs = [
            {name: measure(tx, shapes) for name, tx in sides.items()}
            for _ in range(args.repeats)
        ]
        for name in sides:
            seconds, temporaries = zip(*[run[name] for run in runs], strict=True)
            megabytes = temporaries[0] / 1e6
            table.add(len(shapes), name, statistics.median(seconds), megabytes)
    report.write()


def momentum() -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-3),
    )


def compile_update(
    tx: optax.GradientTransformation, shapes: Shapes
) -> tuple[float, int]:
    """Returns the processors' seconds from an empty cache, and bytes."""
    jax.clear_caches()
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    state = jax.eval_shape(tx.init, params)
    start = time.process_time()
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    seconds = time.process_time() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    return seconds, memory.temp_size_in_bytes


def trace(tx: optax.GradientTransformation, shapes: Shapes) -> tuple[float, int]:
    """Returns the processors' seconds to trace `init` and the update."""
    jax.clear_caches()
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    start = time.process_time()
    state = jax.eval_shape(tx.init, params)
    jax.jit(tx.update).trace(params, state, params)
    return time.process_time() - start, 0


if __name__ == "__main__":
    main()

"""Times Muon's update on GPT-2 124M's 72 hidden matrices against its peers, on CPU.

    python benchmarks/newton_schulz.py

Both sides of a ratio take turns in one process; a ratio is the median of the ratios of
neighbours, so that a load on the machine that lasts falls on both.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from environment import environment
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc
from muonclip_jax._strategy import choose_strategy


Shapes = dict[str, tuple[int, ...]]
Sides = Mapping[str, Callable[[], Any]]

BLOCK: Shapes = {name: (768, 768) for name in ("query", "key", "value", "out")} | {
    "up": (768, 3072),
    "down": (3072, 768),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(environment(), end="\n\n")
    cases = {
        f"{6 * args.layers} separate leaves": separate(args.layers),
        "stacked leaves": {k: (args.layers, *shape) for k, shape in BLOCK.items()},
        f"{2 * args.layers} x (768, 3072)": {
            str(i): BLOCK["up"] for i in range(2 * args.layers)
        },
    }
    row("update, seconds", "ours", "peer", "times faster", "share of peak")
    row(*["---"] * 5)
    for name, shapes in cases.items():
        times = alternate(updates(shapes) | {"peak": large_product()}, args.repeats)
        share = statistics.median(
            needed_flops(shapes) / ours / (2 * PRODUCT**3 / product)
            for ours, product in zip(times["ours"], times["peak"], strict=True)
        )
        row(f"{name}, optax", *compare(times, "optax"), f"{share:.0%}")
    against_torch(cases[f"{6 * args.layers} separate leaves"], args.repeats)
    print()
    compilation()


def separate(layers: int) -> Shapes:
    return {f"{i}/{k}": shape for i in range(layers) for k, shape in BLOCK.items()}


def optimizers(shapes: Shapes) -> dict[str, optax.GradientTransformation]:
    axes = {k: MuonDimensionNumbers(-2, -1) for k in shapes}
    return {
        "ours": mc.muon(1e-3, dimension_numbers=axes),
        "optax": optax.contrib.muon(
            1e-3,
            weight_decay=0.1,
            consistent_rms=0.2,
            muon_weight_dimension_numbers={
                # optax counts axes from the front.
                k: MuonDimensionNumbers(len(shape) - 2, len(shape) - 1)
                for k, shape in shapes.items()
            },
        ),
    }


def updates(shapes: Shapes) -> dict[str, Callable[[], Any]]:
    def side(tx):
        state, update = tx.init(params), jax.jit(tx.update)
        return lambda: jax.block_until_ready(update(grads, state, params))

    keys = jax.random.split(jax.random.key(0), len(shapes))
    grads = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = jax.tree.map(jnp.ones_like, grads)
    return {name: side(tx) for name, tx in optimizers(shapes).items()}


PRODUCT = 2048


def large_product() -> Callable[[], Any]:
    """One large product, as the measure of what the machine can do."""
    x = jax.random.normal(jax.random.key(0), (PRODUCT, PRODUCT))
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(x, x).block_until_ready()


def alternate(sides: Sides, repeats: int) -> dict[str, list[float]]:
    for run in sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def compare(times: Mapping[str, list[float]], peer: str) -> tuple[str, str, str]:
    pairs = zip(times[peer], times["ours"], strict=True)
    ratio = statistics.median(theirs / ours for theirs, ours in pairs)
    ours, theirs = (statistics.median(times[name]) for name in ("ours", peer))
    return f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}"


def needed_flops(shapes: Shapes, steps: int = 5) -> float:
    """The arithmetic of the iteration as it runs, Hermitian halves left out."""
    total = 0.0
    for *stack, rows, columns in shapes.values():
        m, n = sorted((rows, columns))
        chosen = choose_strategy((m, n), jnp.dtype("float32"), "auto", "cpu")
        part = (chosen.blocks + 1) / (2 * chosen.blocks)
        outer, inner = 2 * m * m * n, 2 * m**3
        if chosen.gram:
            flops = part * (outer + (4 * steps - 3) * inner) + outer
        else:
            flops = steps * (part * (outer + inner) + outer)
        total += flops * (stack[0] if stack else 1)
    return total


def against_torch(shapes: Shapes, repeats: int) -> None:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        row("torch.optim.Muon", "", "", "torch is not installed", "")
        return
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes.values()]
    for param in params:
        param.grad = torch.randn_like(param)
    theirs = torch.optim.Muon(params, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    sides = {"ours": updates(shapes)["ours"], "torch": theirs.step}
    row("torch.optim.Muon", *compare(alternate(sides, repeats), "torch"), "")


def compilation(layers: tuple[int, ...] = (12, 56), repeats: int = 3) -> None:
    row("leaves", "", "trace and compile, seconds", "temporaries, MB")
    row(*["---"] * 4)
    for count in layers:
        for name, tx in optimizers(separate(count)).items():
            runs = [compile_update(tx, separate(count)) for _ in range(repeats)]
            seconds = statistics.median(seconds for seconds, _ in runs)
            row(str(6 * count), name, f"{seconds:.2f}", f"{runs[0][1] / 1e6:.0f}")


def compile_update(tx, shapes: Shapes) -> tuple[float, int]:
    jax.clear_caches()
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    state = jax.eval_shape(tx.init, params)
    start = time.perf_counter()
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    return seconds, memory.temp_size_in_bytes


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

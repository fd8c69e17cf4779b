"""Muon by several libraries: one model, text, grid of rates, the same initial weights.

    python benchmarks/libraries.py                       # those that are installed here
    OTHER/bin/python benchmarks/libraries.py keras_muon  # in an environment of its own

Each library is a file in `libraries/`; how to add one is said there. Results are lines
in `libraries/results.jsonl`, and those that are there are not made again. The table of
all that is there is printed at the end: steps to AdamW's loss under a constant rate,
the loss under a cosine schedule, the time of an update, and the bytes that it keeps and
takes at its peak. Times are of the processor, so keep it to one core:

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/libraries.py
"""

import argparse
import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from environment import environment
from evidence.intervals import Interval, interval
from evidence.model import Transformer
from evidence.run import Run
from evidence.texts import text
from evidence.training import mean_loss
from evidence.tuning import RATES
from flax import nnx
from libraries import Arrays, Leaf, Optimizer, Start
from tables import Table
from walk import neighbors, walk


HERE = Path(__file__).parent
GOAL = "adamw"
NAMES = ("adamw", "this_package", "optax_muon", "rollfast_muon", "keras_muon")
NAMES += ("torch_muon", "heavyball_muon", "optax_muon_of_main")
STEPS, WARM_UP, DECAY, EVALUATIONS, SEEDS = 400, 20, 0.1, 10, (1, 2, 3, 4, 5)
CONSTANT, COSINE = "constant", "cosine"
START = 1.6e-2
MODEL = Run(corpus="prose", layers=2, width=32, heads=2, statistics=False)
# The largest model of the experiment on defaults: 3.1 million parameters in matrices.
TIMED = MODEL.but(layers=4, width=256, heads=4)
REPEATS = 15


def main() -> None:
    args = parse_args()
    results = Results(args.out)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Every run makes its optimizer anew, and would compile it anew.
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        for name in args.libraries:
            try:
                start = importlib.import_module(f"libraries.{name}").Optimizer
            except ModuleNotFoundError as missing:
                print(f"{name} is left out: {missing}")
                continue
            measure(name, start, results, args.steps)
    print(table(results).markdown())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="*", default=NAMES, help=", ".join(NAMES))
    default = HERE / "libraries" / "results.jsonl"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer for a trial")
    return parser.parse_args()


class Results:
    """Lines of JSON, by what they are of."""

    def __init__(self, file: Path):
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.lines = {line["of"]: line for line in map(json.loads, lines)}

    def once(self, of: str, make) -> dict[str, Any]:
        if of not in self.lines:
            line = {"of": of, **make(), "environment": environment()}
            self.lines[of] = line
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(of, *(f"{k} {v}" for k, v in line.items() if k in ("tune", "ms")))
        return self.lines[of]


def measure(name: str, start: Start, results: Results, steps: int) -> None:
    """Tunes the rate with seed 0, trains with the others, and times an update."""
    for schedule in (CONSTANT, COSINE):
        make = functools.partial(summary, name, start, results, schedule, steps)
        results.once(f"{name}, {kind(schedule)}summary of {steps} steps", make)
    results.once(f"{name}, time", lambda: time_update(start))
    results.once(f"{name}, memory", lambda: peak_of_update(start))


def kind(schedule: str) -> str:
    """What results under a schedule are called; those of a constant rate came first."""
    return "" if schedule == CONSTANT else f"{schedule}, "


def summary(
    name: str, start: Start, results: Results, schedule: str, steps: int
) -> dict[str, Any]:
    def run(rate: float, seed: int) -> dict[str, Any]:
        of = f"{name}, {kind(schedule)}rate {rate:g}, seed {seed}, {steps} steps"
        return results.once(of, lambda: train(start, rate, seed, steps, schedule))

    near = functools.partial(neighbors, RATES)
    best = walk(START, near, lambda rates: [run(r, 0)["tune"] for r in rates])
    of_seeds = [run(best, seed) for seed in SEEDS]
    package = getattr(start, "package", name)
    return {
        "library": name,
        "version": f"{package} {version(package)}",
        "schedule": schedule,
        "rate": best,
        "curves": [r["curve"] for r in of_seeds],
        "weights": [r["weights"] for r in of_seeds],
    }


def version(package: str) -> str:
    if package == "muonclip_jax":
        return "of this checkout"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


class Task:
    """A model by the paths of its params, with 2-D kernels, and its loss."""

    def __init__(self, run: Run):
        model = Transformer(run, nnx.Rngs(0))
        self._graph, state, self._others = nnx.split(model, nnx.Param, ...)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        paths = [
            "/".join(str(getattr(k, "key", k)) for k in path if hasattr(k, "key"))
            for path, _ in leaves
        ]
        self._shapes = {p: x.shape for p, (_, x) in zip(paths, leaves, strict=True)}
        self.leaves = {path: self._leaf(path) for path in paths}
        self.gradient = jax.jit(jax.value_and_grad(self._loss))
        self.loss = jax.jit(lambda p, x: jax.lax.map(lambda b: self._loss(p, b), x))

    def params(self, seed: int) -> Arrays:
        """Initial weights, by NumPy: those of JAX and Flax differ between versions."""
        generator, drawn = np.random.default_rng(seed), {}
        for path, shape in self._shapes.items():
            flat = np.ones(self._flat(path, shape), np.float32)
            if flat.ndim > 1:
                # An embedding has its features last, and no inputs to sum over.
                inputs = flat.shape["embed" in path]
                flat = generator.normal(size=flat.shape) / np.sqrt(inputs)
            drawn[path] = flat.astype(np.float32)
        return drawn

    def _flat(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) != 3:
            return shape
        # (heads, features, outputs) after attention, (inputs, heads, features) before
        a, b, c = shape
        return (a * b, c) if "out/" in path else (a, b * c)

    def _leaf(self, path: str) -> Leaf:
        shape = self._shapes[path]
        is_matrix = path.startswith("blocks") and len(shape) > 1
        has_heads = len(shape) == 3 and "out/" not in path
        return Leaf(is_matrix, shape[-1] if has_heads else None)

    def _loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        leaves = [params[path].reshape(shape) for path, shape in self._shapes.items()]
        state = jax.tree_util.tree_unflatten(self._tree, leaves)
        return mean_loss(nnx.merge(self._graph, state, self._others), tokens)


@functools.cache
def task_of(run: Run) -> Task:
    return Task(run)


def train(
    start: Start, rate: float, seed: int, steps: int, schedule: str = CONSTANT
) -> dict[str, Any]:
    """The loss on the text to report on along the run, and at its end that to tune."""
    task, source, run = task_of(MODEL), text(MODEL.corpus), MODEL
    held_out = {
        part: source.held_out(part, 512, run.context).reshape(-1, 16, run.context + 1)
        for part in ("tune", "report")
    }
    params, curve = task.params(seed), []
    weights = sum(float(np.abs(x).sum(dtype=np.float64)) for x in params.values())
    optimizer = start(params, task.leaves, DECAY)
    for i in range(steps):
        tokens = source.batch(run.batch, run.context, seed, i)
        _, gradients = task.gradient(params, tokens)
        gradients = {path: np.asarray(x) for path, x in gradients.items()}
        params = optimizer.step(gradients, rate * share(schedule, i + 1, steps))
        if (i + 1) * EVALUATIONS % steps < EVALUATIONS:
            loss = float(task.loss(params, held_out["report"]).mean())
            curve.append((i + 1, round(loss, 5)))
    tune = float(task.loss(params, held_out["tune"]).mean())
    tune = round(tune, 5) if np.isfinite(tune) else float("inf")
    return {"curve": curve, "tune": tune, "weights": round(weights, 3)}


def share(schedule: str, step: int, steps: int) -> float:
    """Of the rate: it rises in a straight line, and then stays or falls to zero."""
    if step < WARM_UP or schedule == CONSTANT:
        return min(1.0, step / WARM_UP)
    return (1 + np.cos(np.pi * (step - WARM_UP) / (steps + 1 - WARM_UP))) / 2


def time_update(start: Start) -> dict[str, Any]:
    """The processor's time, the least of several: other load counts little then.

    Run it on one core, since the work of several adds up.
    """
    step, optimizer, count = an_update(start)
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    state = optimizer.state_bytes() / count
    return {"ms": round(1e3 * min(seconds[1:]), 3), "state": round(state, 2)}


def an_update(start: Start) -> tuple[Callable[[], Any], Optimizer, int]:
    """Of the larger model, with drawn gradients; the optimizer; the count of params."""
    task, generator = task_of(TIMED), np.random.default_rng(0)
    params = task.params(0)
    gradients = {
        path: generator.normal(size=x.shape).astype(np.float32)
        for path, x in params.items()
    }
    optimizer = start(params, task.leaves, DECAY)
    count = sum(x.size for x in params.values())
    return lambda: optimizer.step(gradients, 1e-3), optimizer, count


def peak_of_update(start: Start) -> dict[str, Any]:
    """Bytes a parameter at the peak of an update, without old params and gradients.

    As Linux counts the pages of this process; its C library gives back first what is
    free. NaN where the system does not count them.
    """
    step, optimizer, count = an_update(start)
    step()  # compiles, and makes what is made once
    peaks = []
    for _ in range(REPEATS):
        before = _begin_peak()
        step()
        peaks.append(_pages("VmHWM") - before)
    of_step = float(np.median(peaks)) / count
    return {"peak": round(of_step + optimizer.state_bytes() / count, 2)}


def _begin_peak() -> float:
    """Bytes of this process, from which its peak rises now."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # of the system alone, not of an update
        return float("nan")
    return _pages("VmRSS")


def _pages(name: str) -> float:
    """Bytes, from a line such as `VmRSS:   1234 kB`; NaN where there are none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    lines = status.read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(name))


def steps_to(curve: list[list[float]], goal: float) -> float:
    """Where a curve first comes to the goal, in a straight line between its points."""
    before = None
    for step, loss in curve:
        if loss <= goal:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - goal) / (
                before[1] - loss
            )
        before = (step, loss)
    return float("nan")


def table(results: Results) -> Table:
    """Of all libraries that are finished, in the order of the steps they need."""
    found = {
        (line["library"], line.get("schedule", CONSTANT)): line
        for line in results.lines.values()
        if "library" in line
    }
    columns = ["", "version", "rate", "loss", "steps to AdamW's loss", "of AdamW's"]
    columns += ["cosine: rate", "cosine: loss", "update, ms of a core"]
    columns += ["state, bytes a parameter", "peak, bytes a parameter"]
    if (GOAL, CONSTANT) not in found:
        return Table(columns)
    goals = [curve[-1][1] for curve in found[GOAL, CONSTANT]["curves"]]
    names = [name for name, schedule in found if schedule == CONSTANT]
    steps = {
        name: interval(
            [
                steps_to(c, g)
                for c, g in zip(found[name, CONSTANT]["curves"], goals, strict=True)
            ]
        )
        for name in names
    }
    for (name, _), line in found.items():
        if line["weights"] != found[GOAL, CONSTANT]["weights"]:
            warnings.warn(f"{name} began with other weights", stacklevel=2)
    last = found[GOAL, CONSTANT]["curves"][0][-1][0]
    rows = []
    for name in sorted(names, key=lambda name: steps[name].mean):
        line, cosine = found[name, CONSTANT], found.get((name, COSINE))
        of_adamw = Interval(steps[name].mean / last, steps[name].half / last)
        rows.append(
            [
                name,
                line["version"],
                f"{line['rate']:g}",
                at_the_end(line),
                steps[name].show(".0f"),
                of_adamw.show(".0%"),
                *([f"{cosine['rate']:g}", at_the_end(cosine)] if cosine else "--"),
                *of_an_update(results, name),
            ]
        )
    return Table(columns, rows)


def at_the_end(line: dict[str, Any]) -> str:
    return interval([curve[-1][1] for curve in line["curves"]]).show()


def of_an_update(results: Results, name: str) -> list[str]:
    timed, memory = (results.lines.get(f"{name}, {x}", {}) for x in ("time", "memory"))
    shown = {"ms": ".0f", "state": ".1f", "peak": ".1f"}
    return [
        f"{(timed | memory)[key]:{form}}" if key in timed | memory else "-"
        for key, form in shown.items()
    ]


if __name__ == "__main__":
    main()

"""LightBench's tasks and rules in JAX: AdamW and Muon against the published results.

    python benchmarks/lightbench.py                       # all tasks
    python benchmarks/lightbench.py --tasks beale xor_digit
    python benchmarks/lightbench.py --quick               # a trial of the script
    python benchmarks/lightbench.py --published FILE.md   # LightBench's own results

A task is passed if any of its attempts comes to its bound; after the first difficulty
that is not passed, harder ones count as not passed. As in LightBench, an attempt has
three hyperparameters (rate, beta1, beta2) from wide ranges, a warm-up of 100 steps and
no weight decay, and ends when its loss rises. Both optimizers get the same attempts.
Simpler than there, and far shorter:

- Hyperparameters are points of a scrambled Sobol sequence. LightBench has HEBO, up to
    1,000 attempts and up to a million steps.
- Attempts end by successive halving: all run for a while, the best quarter by the loss
    four times longer, the best quarter of that 16 times.

The tasks are in `lightbench_tasks.py`. Of those with published results are missing
`noisy_matmul` (up to 10 million normal numbers a step), `gradient_delay` (PyTorch
leaves a parameter without a gradient alone, Optax does not) and the longer sequences
of the recurrent tasks, which take hours.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from lightbench_tasks import Array, DIFFICULTIES, Params, Step, Task, TASKS
from scipy.stats import qmc
from tables import parser, Report

import muonclip_jax as mc


PUBLISHED = Path(__file__).parent / "lightbench_published.json"
WARM_UP = 100
# Decimal logarithms of the rate, of 1 - beta1 and of 1 - beta2.
LEAST, MOST = (-7, -5, -7), (2, 0, 0)
ROUNDS, KEPT = 3, 4
# LightBench's rule for a loss that rises: averages of its last 2 to 2^20 values, and by
# what share a faster one is above a slower one for how many steps in a row.
FACTORS = 0.5 ** np.arange(1, 21)
RISES = {1e-4: 2048, 1e-3: 512, 0.01: 128, 0.1: 32}
RISES |= {0.33: 16, 0.5: 8, 0.75: 4, 0.99: 2}
WATCHED_FROM = 256
FOUR: dict[str, str] = dict.fromkeys(
    ("AdamW here", "AdamW published", "Muon here", "Muon published"), ""
)


def main() -> None:
    args = parse_args()
    if args.published:
        PUBLISHED.write_text(json.dumps(read_published(args.published), indent=1))
        return
    published = json.loads(PUBLISHED.read_text())["passed_at_attempt"]
    report = Report(args)
    verdicts = report.table(
        "Passed or not, here and as published",
        dict.fromkeys(("task", "difficulty", "matrices"), "") | FOUR,
    )
    winners = []
    for name in args.tasks:
        for row, found in rows(name, args.quick, args.seed):
            theirs = (None, None)  # of a task of one's own
            if of_task := published.get(name):
                theirs = [
                    _mark(row.difficulty in of_task[o]) for o in ("AdamW", "Muon")
                ]
            cells = (_mark(row.adamw), theirs[0], _mark(row.muon), theirs[1])
            verdicts.add(name, row.difficulty, _mark(row.matrices), *cells)
            winners += [(name, row.difficulty, *winner) for winner in found]
        report.write()
    columns = {"task": "", "difficulty": "", "optimizer": "", "step": ",.0f"}
    columns |= {"rate": ".1e", "1 - beta1": ".1e", "1 - beta2": ".1e", "s": ".1f"}
    table = report.table("The attempts that passed", columns)
    for winner in winners:
        table.add(*winner)
    add_counts(report, verdicts.rows)
    report.write()


def parse_args() -> argparse.Namespace:
    args = parser(__doc__)
    args.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="NAME")
    args.add_argument("--quick", action="store_true", help="few attempts, the easiest")
    args.add_argument("--seed", type=int, default=0, help="of tasks and of attempts")
    args.add_argument("--published", type=Path, metavar="FILE", help="read and keep")
    parsed = args.parse_args()
    if unknown := sorted(set(parsed.tasks) - set(TASKS)):
        args.error(f"no task {', '.join(unknown)}; there are {', '.join(TASKS)}")
    return parsed


# Optimizers


def adamw(rate: Array, beta1: Array, beta2: Array, model: mc.ModelReading):
    return optax.adamw(rate, b1=beta1, b2=beta2, weight_decay=0.0)


def muon(rate: Array, beta1: Array, beta2: Array, model: mc.ModelReading):
    """Muon's defaults for the matrices; AdamW for the rest, with the same betas."""
    return mc.muon(
        rate,
        beta=beta1,
        adam_b1=beta1,
        adam_b2=beta2,
        weight_decay=0.0,
        model=model,
    )


def read_task(task: Task, difficulty: Any) -> mc.ModelReading:
    key = jax.random.key(0)
    params = jax.eval_shape(lambda: task.init(key, difficulty))
    step = Step(jnp.ones((), int), key, key)
    return mc.read_model(lambda p: task.loss(p, step, difficulty), params)


def has_matrices(model: mc.ModelReading) -> bool:
    return "matrix" in jax.tree.leaves(model.labels)


# One attempt, and several at once


class Watch(NamedTuple):
    """Averages of the loss, and for how many steps in a row they rose by each share."""

    averages: Array
    rises: Array


class Attempt(NamedTuple):
    """Hyperparameters, and how far an attempt with them is."""

    hyperparameters: tuple[Array, Array, Array]
    params: Params
    state: Any
    watch: Watch
    is_running: Array
    has_passed: Array

    def loss(self) -> Array:
        least = jnp.min(self.watch.averages, axis=-1)
        return jnp.where(self.is_running, least, jnp.inf)


def start(optimizer, hyperparameters, params: Params) -> Attempt:
    return Attempt(
        hyperparameters,
        params,
        optimizer(*hyperparameters).init(params),
        Watch(jnp.zeros(len(FACTORS)), jnp.zeros(len(RISES), int)),
        is_running=jnp.array(True),
        has_passed=jnp.array(False),
    )


def watched(watch: Watch, loss: Array, number: Array) -> tuple[Watch, Array]:
    """The averages with this loss, and whether the attempt may go on."""
    share = FACTORS / (1 - (1 - FACTORS) ** number)
    averages = watch.averages + share * (loss - watch.averages)
    # The fastest averages are first: the largest of those that are faster than each.
    faster = jax.lax.cummax(averages)[:-1]
    shares, steps = (jnp.array(list(x)) for x in (RISES.keys(), RISES.values()))
    rose = jnp.any(averages[1:] * (1 + shares[:, None]) < faster, axis=1)
    rises = jnp.where(rose, watch.rises + 1, 0)
    stops = jnp.any(rises >= steps) & (number >= WATCHED_FROM)
    return Watch(averages, rises), jnp.isfinite(loss) & ~stops


def group_of_steps(task, difficulty, optimizer, key, first, attempt: Attempt):
    transformation = optimizer(*attempt.hyperparameters)

    def step(carry, number):
        params, state, watch, is_running, least = carry
        keys = [jax.random.fold_in(key, number - i) for i in (0, 1)]
        where = Step(number, *keys)
        loss, gradients = jax.value_and_grad(task.loss)(params, where, difficulty)
        updates, state = transformation.update(gradients, state, params)
        # Without weight decay an update is proportional to the rate.
        warm = jnp.minimum(number / WARM_UP, 1)
        params = jax.tree.map(lambda p, u: p + warm * u, params, updates)
        # The loss of the step that ends an attempt still counts, if it is a number.
        least = jnp.where(is_running, jnp.fmin(least, loss), least)
        watch, goes_on = watched(watch, loss, number)
        return (params, state, watch, is_running & goes_on, least), None

    carry = (attempt.params, attempt.state, attempt.watch, attempt.is_running, jnp.inf)
    numbers = first + jnp.arange(task.group)
    (params, state, watch, is_running, least), _ = jax.lax.scan(step, carry, numbers)
    # LightBench looks at the losses of a group after it, with its last parameters.
    has_passed = attempt.is_running & task.passed(params, least)
    return Attempt(
        attempt.hyperparameters, params, state, watch, is_running, has_passed
    )


@functools.partial(jax.jit, static_argnums=range(3))
def run(task, difficulty, optimizer, key, first, last, attempts: Attempt):
    """Steps from `first` to `last`, by groups, until one passes or all have ended.

    Returns the step after the last, and the attempts.
    """
    group = functools.partial(group_of_steps, task, difficulty, optimizer, key)

    def goes_on(carry):
        number, attempts = carry
        goes_on = jnp.any(attempts.is_running) & ~jnp.any(attempts.has_passed)
        return goes_on & (number <= last)

    def body(carry):
        number, attempts = carry
        attempts = jax.vmap(group, in_axes=(None, 0))(number, attempts)
        return number + task.group, attempts

    return jax.lax.while_loop(goes_on, body, (first, attempts))


# The search


class Passed(NamedTuple):
    step: int
    rate: float
    beta1_from_1: float
    beta2_from_1: float


def draw_hyperparameters(count: int, seed: int) -> np.ndarray:
    """Rate, 1 - beta1 and 1 - beta2, evenly in their logarithms: (count, 3)."""
    sequence = qmc.Sobol(3, rng=seed)
    points = sequence.random_base2(int(np.ceil(np.log2(count))))[:count]
    return 10 ** qmc.scale(points, LEAST, MOST)


def search(task: Task, difficulty: Any, optimizer, seed: int = 0) -> Passed | None:
    """The attempt that passes first, or None."""
    optimizer = functools.partial(optimizer, model=read_task(task, difficulty))
    init_key, key = jax.random.split(jax.random.key(seed))
    params = task.init(init_key, difficulty)
    drawn = draw_hyperparameters(task.attempts, seed).astype(np.float32)

    def start_with(drawn):
        rate, beta1_from_1, beta2_from_1 = drawn
        hyperparameters = (rate, 1 - beta1_from_1, 1 - beta2_from_1)
        return start(optimizer, hyperparameters, params)

    attempts, first, steps = jax.vmap(start_with)(drawn), 1, task.steps
    for _ in range(ROUNDS):
        count = len(drawn)
        size = count if task.at_once else 1
        parts = []
        for i in range(0, count, size):
            part = jax.tree.map(lambda x, i=i, n=size: x[i : i + n], attempts)
            last = first + steps - 1
            number, part = run(task, difficulty, optimizer, key, first, last, part)
            if part.has_passed.any():
                winner = drawn[i + int(part.has_passed.argmax())]
                return Passed(int(number) - 1, *map(float, winner))
            parts.append(part)
        attempts = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        best = np.argsort(attempts.loss(), kind="stable")[: max(1, count // KEPT)]
        attempts, drawn = jax.tree.map(lambda x, b=best: x[b], attempts), drawn[best]
        first, steps = first + steps, KEPT * steps
    return None


class Row(NamedTuple):
    difficulty: str
    matrices: bool
    adamw: bool
    muon: bool


def rows(name: str, quick: bool, seed: int) -> Iterator[tuple[Row, list[tuple]]]:
    """One for each difficulty, with the attempts that passed it."""
    task = TASKS[name]
    if quick:
        easiest = dict(itertools.islice(task.difficulties.items(), 1))
        small = dict(attempts=min(16, task.attempts), steps=min(256, task.steps))
        task = dataclasses.replace(task, difficulties=easiest, **small)
    passes = {"AdamW": True, "Muon": True}
    for label, difficulty in task.difficulties.items():
        matrices, found = has_matrices(read_task(task, difficulty)), []
        for optimizer, make in (("AdamW", adamw), ("Muon", muon)):
            if optimizer == "Muon" and not matrices:
                # Without a matrix Muon is AdamW, step by step.
                passes["Muon"] = passes["AdamW"]
            elif passes[optimizer]:
                begin = time.process_time()
                result = search(task, difficulty, make, seed)
                passes[optimizer] = result is not None
                if result:
                    seconds = time.process_time() - begin
                    found.append((optimizer, *result, seconds))
        yield Row(label, matrices, passes["AdamW"], passes["Muon"]), found


# What LightBench published


def read_published(file: Path) -> dict[str, Any]:
    """The attempt that passed, by task, optimizer and difficulty, of plain variants.

    Of the table in LightBench's `benchmark_results.md`; seed 0 is all it has.
    """
    passed: dict[str, Any] = {}
    for line in file.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|\n ").split("|")]
        if len(cells) != 10 or cells[1] not in ("AdamW", "Muon"):
            continue
        benchmark, optimizer, cautious, mars, success, _, _, attempt, *_ = cells
        if (cautious, mars) != ("No", "No"):
            continue
        name, difficulty = benchmark.rsplit("-", 1)
        of_task = passed.setdefault(name, {"AdamW": {}, "Muon": {}})
        if success == "✓":
            of_task[optimizer][difficulty] = int(attempt)
    for of_task in passed.values():
        for optimizer, attempts in of_task.items():
            ordered = sorted(attempts, key=DIFFICULTIES.index)
            of_task[optimizer] = {d: attempts[d] for d in ordered}
    source = "lightbench 0.1.1 on PyPI, lightbench/benchmark_results.md"
    return {"source": source, "passed_at_attempt": dict(sorted(passed.items()))}


def add_counts(report: Report, rows: list) -> None:
    table = report.table("Passed, of all rows above", {"": "", "rows": ""} | FOUR)
    for label, kind in (("all", None), ("with a matrix", "yes"), ("vectors", "no")):
        chosen = [row for row in rows if kind in (None, row[2])]
        marks = zip(*(row[3:] for row in chosen), strict=True)
        counts = [str(sum(m == _mark(True) for m in column)) for column in marks]
        if chosen:
            table.add(label, str(len(chosen)), *counts)


def _mark(holds: bool) -> str:
    return "yes" if holds else "no"


if __name__ == "__main__":
    main()

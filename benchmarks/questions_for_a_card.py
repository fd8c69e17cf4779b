"""Choices made by the estimates of a compiler, which only a card can answer.

    python benchmarks/questions_for_a_card.py

Times the update with tall matrices as they are and turned to wide ones; times a
training step of GPT-2 by MuonClip with CUDA graphs ("command buffers") and without,
and without a matrix for each head; and lists the kernels of three such steps. A row
that raises says so, and the rest goes on. `--tiny` runs all of it in small.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import optax
from first_contact.kernels import KERNELS, Kernels, profiled
from first_contact.rounding import platform
from first_contact.rows import add_rows, FAST, Timed
from first_contact.settings import with_constant
from first_contact.times import directions, FULL, Times, TINY
from first_contact.training import (
    compiled_step,
    GPT2,
    Model,
    muonclip,
    row_of_steps,
    TINY_GPT2,
    TRAINED,
    Trained,
)
from gpt2 import gradients, optimizers, separate, Shapes
from internals import platform_named
from tables import parser, Report


WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="
STEP, KERNEL = "step", "kernel"  # what a row of another process is
SECONDS = 120  # that it may take


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tiny", action="store_true", help="everything in small")
    options.add_argument(
        "--minutes", type=float, default=3, help="after these it begins nothing new"
    )
    options.add_argument(
        "--without-graphs", action="store_true", help="the rows of another process"
    )
    args = options.parse_args(arguments)
    # Another process needs memory of the card, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    end = time.perf_counter() + 60 * args.minutes
    model = TINY_GPT2 if args.tiny else GPT2
    program = functools.cache(functools.partial(program_of, model))
    if args.without_graphs:
        print_rows(model, program())
        return

    report, times = Report(args), Times(TINY if args.tiny else FULL)
    sides = {
        "GPT-2": (times.gpt2_shapes(separate), lambda x: optimizers(x)["ours"]),
        "Llama-1B": (times.llama_shapes(separate), lambda x: directions(x)["ours"]),
    }
    turns = {
        name: functools.partial(against_turned, times, *shapes, make)
        for name, (shapes, make) in sides.items()
    }
    add_rows(report.table("Tall matrices", FAST), turns, Timed, end)

    other = functools.cache(functools.partial(rows_without_graphs, args.tiny))
    steps: dict[str, Callable[[], Iterable[Trained]]] = {
        "mc.muonclip": lambda: [row_of_steps(model, "mc.muonclip", *program())],
        WITHOUT_GRAPHS: lambda: [Trained(*row) for row in other()[STEP]],
        "per_head=False": lambda: [
            row_of_steps(model, "per_head=False", *program_of(model, per_head=False))
        ],
    }
    add_rows(report.table("One training step", TRAINED), steps, Trained, end)

    kernels: dict[str, Callable[[], Iterable[Kernels]]] = {
        "mc.muonclip": lambda: profiled(model, *program()),
        WITHOUT_GRAPHS: lambda: [Kernels(*row) for row in other()[KERNEL]],
    }
    for name, rows in kernels.items():
        add_rows(report.table(f"Kernels, {name}", KERNELS), {name: rows}, Kernels, end)


def against_turned(
    times: Times,
    name: str,
    shapes: Shapes,
    make: Callable[[Shapes], optax.GradientTransformation],
) -> Iterator[Timed]:
    usual = platform_named(platform()).turns_tall
    sides = turned(shapes, make)
    named = {"ours": sides[usual], f"turns_tall={not usual}": sides[not usual]}
    yield from times.against(f"{name}, turns_tall={usual},", named)


def turned(
    shapes: Shapes, make: Callable[[Shapes], optax.GradientTransformation]
) -> dict[bool, Callable[[], Any]]:
    """Calls of the update, with tall matrices as they are and turned to wide ones."""
    grads, tx = gradients(shapes), make(shapes)
    arguments = grads, jax.jit(tx.init)(grads), grads
    return {
        turns: with_constant(tx.update, *arguments, turns_tall=turns)
        for turns in (False, True)
    }


def program_of(model: Model, **options: Any) -> tuple[Any, Any]:
    return compiled_step(model, muonclip(model, **options))


def print_rows(model: Model, program: tuple[Any, Any]) -> None:
    """Each as it comes, so that it is there whatever the profiler does."""
    print(json.dumps([STEP, row_of_steps(model, WITHOUT_GRAPHS, *program)]), flush=True)
    for row in profiled(model, *program):
        print(json.dumps([KERNEL, row]), flush=True)


def rows_without_graphs(tiny: bool) -> dict[str, list[Any]]:
    """From a process of its own: the flags are read where one starts."""
    command = ["timeout", str(SECONDS), sys.executable, __file__, "--without-graphs"]
    command += ["--tiny"] * tiny
    flags = f"{os.environ.get('XLA_FLAGS', '')} {WITHOUT_GRAPHS}"
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": flags}
    )
    lines = [json.loads(x) for x in ran.stdout.splitlines() if x.startswith('["')]
    found = {kind: [row for x, row in lines if x == kind] for kind in (STEP, KERNEL)}
    if missing := [kind for kind, rows in found.items() if not rows]:
        why = (ran.stderr.strip().splitlines() or [f"status {ran.returncode}"])[-1]
        for kind in missing:
            name = f"{kind}: {why[:120]}"
            found[kind] = [Trained(name) if kind == STEP else Kernels(name)]
    return found


if __name__ == "__main__":
    main()

"""Times Newton-Schulz alone by aspect ratio, each form against optax's.

    python benchmarks/newton_schulz.py

Stacks of matrices (768, 768 r) for aspect ratios r, in float32 with Keller Jordan's
coefficients. The figure of a form is how many times less of the processors' time it
takes than optax's of the main branch (`optax_main.py`).
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from alternating import by_both_clocks, compare, ratio, Times
from optax.contrib import MuonDimensionNumbers
from optax.contrib._muon import orthogonalize_via_newton_schulz
from optax_main import not_unrolled, RELEASED
from pictures import picture
from tables import parser, Report, Table

import muonclip_jax as mc


WIDTH = 768
ASPECT_RATIOS = (1, 1.25, 1.5, 2, 3, 4, 8)
METHODS = ("standard", "gram", "auto")
COLUMNS = {"aspect ratio": "g", "auto, CPU s": ".3f", "optax": ".3f", RELEASED: ".3f"}
COLUMNS |= dict.fromkeys((f"auto to {RELEASED}", *METHODS), ".2f")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--matrices", type=int, default=4, help="in a stack")
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--png", type=Path, help="speed-up against aspect ratio")
    args = options.parse_args()
    report = Report(args)
    title = f"Newton-Schulz, stacks ({args.matrices}, {WIDTH}, {WIDTH} r)"
    table = report.table(title, COLUMNS)
    for aspect_ratio in ASPECT_RATIOS:
        table.add(aspect_ratio, *figures(time_forms(aspect_ratio, args)))
    if args.png:
        draw(table, args.png)
    report.write()


def time_forms(aspect_ratio: float, args: argparse.Namespace) -> Times:
    shape = (args.matrices, WIDTH, round(WIDTH * aspect_ratio))
    x = jax.random.normal(jax.random.key(0), shape)
    forms = {RELEASED: optax_form(), "optax": not_unrolled(optax_form())} | {
        method: functools.partial(mc.newton_schulz, method=method) for method in METHODS
    }
    sides = {name: functools.partial(jax.jit(run), x) for name, run in forms.items()}
    return by_both_clocks(sides, args.repeats)[1]


def optax_form() -> Callable[[jax.Array], jax.Array]:
    """With the coefficients that are the default of ours."""
    triple = jnp.asarray(mc.NS_COEFFS["keller"][0])
    return functools.partial(
        orthogonalize_via_newton_schulz,
        ns_coeffs=triple,
        dimension_numbers=MuonDimensionNumbers(1, 2),
    )


def figures(times: Times) -> list[float]:
    auto, main, released, _, to_released = compare(times, "auto", "optax", RELEASED)
    faster = [ratio(times, "optax", method) for method in METHODS]
    return [auto, main, released, to_released, *faster]


def draw(table: Table, file: Path) -> None:
    aspect_ratios, _, _, _, _, *speed_ups = zip(*table.rows, strict=True)
    labels = dict(xlabel="aspect ratio", ylabel="CPU time of optax over ours")
    with picture(file, xscale="log", **labels) as axes:
        for method, speed_up in zip(METHODS, speed_ups, strict=True):
            style = "--" if method == "auto" else "-"
            axes.plot(aspect_ratios, speed_up, style, marker="o", label=method)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(aspect_ratios, labels=[f"{r:g}" for r in aspect_ratios])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)


if __name__ == "__main__":
    main()

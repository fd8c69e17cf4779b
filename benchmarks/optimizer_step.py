"""Times Muon's whole update on GPT-2 124M's 72 hidden matrices against its peers.

    python benchmarks/optimizer_step.py

"optax" is its main branch (`optax_main.py`). CPU seconds are those of all processors
together.
"""

import statistics
from typing import Any
from unittest import mock

from alternating import alternate, by_both_clocks, compare, ratio
from gpt2 import BLOCK, separate, Shapes, stacked, updates, updates_by
from optax.contrib import MuonDimensionNumbers
from optax_main import RELEASED
from tables import parser, Report

import muonclip_jax as mc


COLUMNS = {
    "update": "",
    "ours, CPU s": ".2f",
    "peer, CPU s": ".2f",
    "times less CPU": ".2f",
    "ours, s": ".2f",
    "peer, s": ".2f",
    "times faster": ".2f",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--only", choices=PARTS, help="one table")
    args = options.parse_args()
    report = Report(args)
    for name, part in PARTS.items():
        if args.only in (None, name):
            part(report, args)
    report.write()


def against_optax(report: Report, args: Any) -> None:
    layers, repeats = args.layers, args.repeats
    table = report.table("Whole update", COLUMNS)
    cases = {
        f"{6 * layers} separate leaves": separate(layers),
        "stacked leaves": stacked(layers),
        f"{2 * layers} x (768, 3072)": {str(i): BLOCK["up"] for i in range(2 * layers)},
    }
    for name, shapes in cases.items():
        wall, cpu = by_both_clocks(updates(shapes), repeats)
        for peer in ("optax", RELEASED):
            figures = *compare(cpu, "ours", peer), *compare(wall, "ours", peer)
            table.add(f"{name}, {peer}", *figures)


def against_torch(report: Report, args: Any) -> None:
    table = report.table("Against torch.optim.Muon", COLUMNS)
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        table.add("torch is not installed", *[None] * 6)
        return
    shapes = separate(args.layers)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes.values()]
    for param in params:
        param.grad = torch.randn_like(param)
    theirs = torch.optim.Muon(params, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    # torch iterates in bfloat16, unless the method that casts to it does not.
    casts = {"bfloat16": torch.Tensor.bfloat16, "float32": torch.Tensor.float}
    for ours, peer in [("float32",) * 2, ("float32", "bfloat16"), ("bfloat16",) * 2]:
        own = mc.NewtonSchulz(dtype=ours)
        mine = updates(shapes, orthogonalizer=own)["ours"]
        sides = {"ours": mine, "torch": theirs.step}
        with mock.patch.object(torch.Tensor, "bfloat16", casts[peer]):
            wall, cpu = by_both_clocks(sides, args.repeats)
        figures = *compare(cpu, "ours", "torch"), *compare(wall, "ours", "torch")
        name = f"separate leaves in {ours}, torch {torch.__version__} in {peer}"
        table.add(name, *figures)


def options_of_muon(report: Report, args: Any) -> None:
    """What Muon's options cost, with GPT-2's kernels as Flax has them."""
    layers, repeats = args.layers, args.repeats
    heads = {name: (768, 12, 64) for name in ("query", "key", "value")}
    block = BLOCK | heads | {"out": (12, 64, 768)}
    shapes = separate(layers, block)
    made = {
        name: mc.muon(1e-3, dimension_numbers=axes(shapes, name in PER_HEAD), **told)
        for name, told in OPTIONS.items()
    }
    times = alternate(updates_by(shapes, made), repeats)
    title = f"Options of Muon, {6 * layers} leaves"
    columns = {"muon(...)": "", "update, s": ".2f", "over plain": ".2f"}
    table = report.table(title, columns)
    for name in made:
        seconds = statistics.median(times[name])
        table.add(name, seconds, ratio(times, name, "plain"))


EVEN = mc.NewtonSchulz(preconditioning="equilibrated")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "neuron_b2=0.95": dict(neuron_b2=0.95),
    "cautious_weight_decay=True": dict(cautious_weight_decay=True),
    "per_head=True": {},
    "these three": dict(neuron_b2=0.95, cautious_weight_decay=True),
    'preconditioning="equilibrated"': dict(orthogonalizer=EVEN),
    "per_head=True and both": dict(orthogonalizer=EVEN, cautious_weight_decay=True),
    'mu_dtype="bfloat16"': dict(mu_dtype="bfloat16"),
    'mu_dtype="int8"': dict(mu_dtype="int8"),
}
PER_HEAD = ("per_head=True", "these three", "per_head=True and both")


def axes(shapes: Shapes, is_per_head: bool) -> dict[str, MuonDimensionNumbers]:
    def of(name: str) -> MuonDimensionNumbers:
        if name.endswith("out"):
            return MuonDimensionNumbers((0, 1), 2)
        if len(shapes[name]) == 3:
            return MuonDimensionNumbers(0, 2 if is_per_head else (1, 2))
        return MuonDimensionNumbers(0, 1)

    return {name: of(name) for name in shapes}


PARTS = {
    "optax": against_optax,
    "torch": against_torch,
    "options": options_of_muon,
}

if __name__ == "__main__":
    main()

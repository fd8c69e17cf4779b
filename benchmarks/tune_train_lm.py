"""Tunes the learning rates of examples/train_lm.py, each with the weight decay.

    python benchmarks/tune_train_lm.py

Walks from the example's own settings to better neighbors and prints the losses on its
way. Each is that of one run of the example at its default length; finished runs are
kept in `--out`, so that an interrupted walk goes on where it stopped.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tables import parser, Report
from walk import neighbors, walk


EXAMPLE = Path(__file__).parent.parent / "examples" / "train_lm.py"
WEIGHT_DECAYS = (0.0, 0.1, 0.3, 0.5, 1.0, 2.0)


class Place(NamedTuple):
    rate: float
    decay: float


class Grid(NamedTuple):
    """Where to look, along a flag of the example and the weight decay."""

    flag: str
    rates: tuple[float, ...]
    start: Place

    def next_to(self, place: Place) -> Iterator[Place]:
        for rate in neighbors(self.rates, place.rate):
            yield place._replace(rate=rate)
        for decay in neighbors(WEIGHT_DECAYS, place.decay):
            yield place._replace(decay=decay)


ADAMW = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
MUON = (3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
GRIDS = {
    "adamw": Grid("--adam-learning-rate", ADAMW, Place(6e-3, 0.5)),
    "muon": Grid("--learning-rate", MUON, Place(1.2e-2, 0.5)),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/tune_train_lm"))
    options.add_argument("--steps", type=int, default=300)
    args = options.parse_args()
    report = Report(args)
    for optimizer, grid in GRIDS.items():
        write(report, optimizer, grid, seen(optimizer, grid, args))
    report.write()


def seen(optimizer: str, grid: Grid, args: argparse.Namespace) -> dict[Place, float]:
    """The losses at all places where the walk looked."""
    found: dict[Place, float] = {}

    def losses(places: list[Place]) -> list[float]:
        for place in places:
            if place not in found:
                found[place] = loss(optimizer, grid.flag, place, args)
        return [found[place] for place in places]

    walk(grid.start, grid.next_to, losses)
    return found


def loss(optimizer: str, flag: str, place: Place, args: argparse.Namespace) -> float:
    """The final validation loss of one run."""
    out = args.out / f"{optimizer}-{place.rate:g}-{place.decay:g}-{args.steps}"
    if not (out / "results.json").exists():
        options = {
            flag: place.rate,
            "--weight-decay": place.decay,
            "--steps": args.steps,
            "--out": out,
        }
        command = [sys.executable, EXAMPLE, "--optimizer", optimizer]
        command += [str(word) for option in options.items() for word in option]
        subprocess.run(command, check=True, capture_output=True)
    history = json.loads((out / "results.json").read_text())[optimizer]
    return history[-1]["validation_loss"]


def write(
    report: Report, optimizer: str, grid: Grid, found: dict[Place, float]
) -> None:
    rates, decays = (sorted(set(values)) for values in zip(*found, strict=True))
    title = f"validation loss of {optimizer}, {grid.flag} by --weight-decay"
    columns = {"": "g"} | {f"{decay:g}": ".4f" for decay in decays}
    table = report.table(title, columns)
    for rate in rates:
        table.add(rate, *(found.get(Place(rate, decay)) for decay in decays))


if __name__ == "__main__":
    main()

"""Tunes the learning rates of examples/train_lm.py, each with the weight decay.

    python benchmarks/tune_train_lm.py

Walks from the example's own settings to better neighbors and prints the losses on its
way. Each is that of one run of the example at its default length; finished runs are
kept in `--out`, so that an interrupted walk goes on where it stopped.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tables import parser, Report
from train_lm_in_figures import history_of
from walk import neighbors, walk


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
    args = options.parse_args()
    report = Report(args)
    for optimizer, grid in GRIDS.items():
        tune(report, optimizer, grid, args.out)
    report.write()


def tune(report: Report, optimizer: str, grid: Grid, out: Path) -> None:
    """Writes the final validation losses at all places where the walk looked."""

    @functools.cache
    def loss(place: Place) -> float:
        found[place] = final_loss(optimizer, grid.flag, place, out)
        return found[place]

    found: dict[Place, float] = {}
    walk(grid.start, grid.next_to, lambda places: [*map(loss, places)])
    rates, decays = (sorted(set(values)) for values in zip(*found, strict=True))
    title = f"validation loss of {optimizer}, {grid.flag} by --weight-decay"
    columns = {"": "g"} | {f"{decay:g}": ".4f" for decay in decays}
    table = report.table(title, columns)
    for rate in rates:
        table.add(rate, *(found.get(Place(rate, decay)) for decay in decays))


def final_loss(optimizer: str, flag: str, place: Place, out: Path) -> float:
    flags = {flag: place.rate, "--weight-decay": place.decay}
    folder = out / f"{optimizer}-{place.rate:g}-{place.decay:g}"
    return history_of(optimizer, folder, flags)[-1]["validation_loss"]


if __name__ == "__main__":
    main()

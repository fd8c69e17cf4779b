"""What each preset of coefficients does to singular values, with certified bounds.

    python benchmarks/coefficients.py

Exact arithmetic: bounds by intervals that cover the whole range, not by samples. In
bfloat16: every number of the range, rounded after each step; products of matrices round
more than that.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from certify import image
from pictures import picture
from tables import parser, Report

import muonclip_jax as mc


PIECES = 2**16
COLUMNS = {
    "preset": "",
    "steps": "d",
    "p'(0)": ".0f",
    "least on [1e-3, 1]": ".4f",
    "most": ".4f",
    "least on [1e-2, 1]": ".4f",
    "most there": ".4f",
    "abs(p - 1) there": ".4f",
    "at least 0.5 from": ".1e",
    "at least 0.7 from": ".1e",
    "in (0, 2] up to": ".4f",
}


class Ranges(NamedTuple):
    """Consecutive ranges of singular values, and bounds on what becomes of each."""

    start: np.ndarray
    end: np.ndarray
    low: np.ndarray
    high: np.ndarray


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--png", type=Path, help="the composed polynomials")
    args = options.parse_args()
    report = Report(args)
    table = report.table("Coefficients", COLUMNS)
    for name, schedule in mc.NS_COEFFS.items():
        for suffix, ranges in (("", certified), (", bfloat16", rounded)):
            gain = float(np.prod([a for a, _, _ in schedule]))
            table.add(name + suffix, len(schedule), gain, *figures(ranges, schedule))
    if args.png:
        draw(args.png)
    report.write()


def certified(start: float, end: float, schedule) -> Ranges:
    edges = np.geomspace(start, end, PIECES + 1)
    return Ranges(edges[:-1], edges[1:], *image((edges[:-1], edges[1:]), schedule))


def rounded(start: float, end: float, schedule) -> Ranges:
    """Every bfloat16 number between, each a range of its own."""
    finite = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
    numbers = finite.astype(np.float64)
    numbers = values = numbers[(numbers >= start) & (numbers <= end)]
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b, c in schedule:
            values = a * values + b * values**3 + c * values**5
            values = values.astype(ml_dtypes.bfloat16).astype(np.float64)
    return Ranges(numbers, numbers, values, values)


def figures(ranges: Callable[..., Ranges], schedule) -> list[float | None]:
    wide, narrow = (ranges(start, 1, schedule) for start in (1e-3, 1e-2))
    least, most = float(narrow.low.min()), float(narrow.high.max())
    return [
        float(wide.low.min()),
        float(wide.high.max()),
        least,
        most,
        max(abs(least - 1), abs(most - 1)),
        kept_from(ranges(1e-6, 1, schedule), 0.5),
        kept_from(ranges(1e-6, 1, schedule), 0.7),
        safe_up_to(ranges(1, 4, schedule)),
    ]


def kept_from(ranges: Ranges, least: float) -> float | None:
    """From where on no output is below `least`; None if the last one is."""
    kept = np.logical_and.accumulate((ranges.low >= least)[::-1])[::-1]
    return float(ranges.start[kept][0]) if kept.any() else None


def safe_up_to(ranges: Ranges) -> float | None:
    """How far all outputs are in (0, 2]; None if the first is not."""
    safe = np.logical_and.accumulate((ranges.low > 0) & (ranges.high <= 2))
    return float(ranges.end[safe][-1]) if safe.any() else None


def draw(file: Path) -> None:
    sigma = np.geomspace(1e-4, 1, 4096)
    labels = dict(xlabel="singular value", ylabel="after all steps")
    with picture(file, xscale="log", **labels) as axes:
        for name, schedule in mc.NS_COEFFS.items():
            value, _ = image((sigma, sigma), schedule)
            label = f"{name}, {len(schedule)} steps"
            axes.plot(sigma, value, linewidth=1, label=label)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")


if __name__ == "__main__":
    main()

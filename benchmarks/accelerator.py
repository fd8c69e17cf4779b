"""First contact with a GPU or TPU: whether all is right there, and how fast it is.

    python benchmarks/accelerator.py

Takes less than ten minutes and prints three tables to paste: what was checked, how
GPT-2 trains, and times of updates. A row that raises says so, and the rest goes on; the
exit status is 1 if a check failed. `--tiny` runs all of it in small, on any machine.
`--candidates` runs kernels that are not in the package instead, on NVIDIA Hopper.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
from first_contact.attention_checks import attention_checks
from first_contact.muon_checks import muon_checks
from first_contact.rows import add_checks, add_rows, Checks, FAST, Parts, RIGHT, Timed
from first_contact.settings import by_setting
from first_contact.symmetric import symmetric_checks, symmetric_parts
from first_contact.times import FULL, Times, TINY
from first_contact.torch_peers import torch_muon
from first_contact.training import GPT2, TINY_GPT2, TRAINED, Trained, trained
from gpt2 import separate, stacked
from tables import parser, Report


T = TypeVar("T")
Training = Mapping[str, Callable[[], Iterable[Trained]]]
RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    end = time.perf_counter() + 60 * args.minutes
    report = Report(args)
    rows = rows_of_candidates if args.candidates else rows_of_package
    right, training, fast = rows(args.tiny)

    def chosen(kind: str, rows: Mapping[str, T]) -> dict[str, T]:
        return {k: v for k, v in rows.items() if is_chosen(f"{kind} {k}", args)}

    right = chosen("check", right)
    failures = add_checks(report.table("Right", RIGHT), right)
    training = chosen("training", training)
    add_rows(report.table("Trained", TRAINED), training, Trained, end)
    fast = chosen("time", fast)
    add_rows(report.table("Fast", FAST), fast, Timed, end)
    print(f"\n{failures} checks failed; all figures are in {args.json}")
    return 1 if failures else 0


def rows_of_package(tiny: bool) -> tuple[Checks, Training, Parts]:
    return checks(tiny), {"GPT-2 124M": train(tiny)}, parts(tiny)


def rows_of_candidates(tiny: bool) -> tuple[Checks, Training, Parts]:
    """In a run of their own, since one that hangs would take all else with it."""
    times = Times(TINY if tiny else FULL)
    fast = {"peak": times.peak_of_products, **symmetric_parts(times)}
    return symmetric_checks(1 if tiny else 32), {}, fast


def is_chosen(name: str, args: argparse.Namespace) -> bool:
    is_left_out = any(part in name for part in args.without)
    return not is_left_out and any(part in name for part in args.only)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--tiny", action="store_true", help="everything in small")
    options.add_argument(
        "--minutes", type=float, default=8, help="after these it begins no other times"
    )
    options.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help='parts of names, such as "check", "time GPT-2" or "training"',
    )
    options.add_argument("--without", nargs="+", default=[], help="the same")
    options.add_argument(
        "--candidates", action="store_true", help="kernels that are not in the package"
    )
    args = options.parse_args(arguments)
    kind = jax.devices()[0].device_kind.lower().replace(" ", "_")
    name = "candidates" if args.candidates else "accelerator"
    args.json = args.json or RESULTS / f"{name}_{kind}.json"
    return args


def checks(tiny: bool) -> Checks:
    return {**muon_checks(48 if tiny else 256), **attention_checks()}


def parts(tiny: bool) -> Parts:
    """First those that decide most."""
    times = Times(TINY if tiny else FULL)
    return {
        "peak": times.peak_of_products,
        "GPT-2, separate": functools.partial(times.gpt2, separate),
        "stage, stacked": functools.partial(times.stage, stacked),
        "torch.optim.Muon": functools.partial(torch_muon, times),
        "Llama-1B, separate": functools.partial(times.llama, separate),
        "settings": functools.partial(by_setting, times),
        "stage, separate": functools.partial(times.stage, separate),
        "GPT-2, stacked": functools.partial(times.gpt2, stacked),
    }


def train(tiny: bool) -> Callable[[], Iterable[Trained]]:
    return functools.partial(trained, TINY_GPT2 if tiny else GPT2)


if __name__ == "__main__":
    sys.exit(main())

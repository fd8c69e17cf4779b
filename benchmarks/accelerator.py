"""First contact with a GPU or TPU: whether all is right there, and how fast it is.

    python benchmarks/accelerator.py

Takes less than ten minutes and prints two tables to paste: what was checked, and what
was timed. A check or a time that raises says so in its row, and the rest goes on; the
exit status is 1 if a check failed. `--tiny` runs all of it in small, on any machine.
"""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from first_contact.attention_checks import attention_checks
from first_contact.muon_checks import muon_checks
from first_contact.rows import add_checks, add_times, Checks, FAST, Parts, RIGHT
from first_contact.settings import by_batch, kernel_parts
from first_contact.times import FULL, Times, TINY
from first_contact.torch_peers import gram_newton_schulz, torch_muon
from gpt2 import separate, stacked
from tables import parser, Report


RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    end = time.perf_counter() + 60 * args.minutes
    report = Report(args)
    failures = add_checks(report.table("Right", RIGHT), checks(args.tiny))
    add_times(report.table("Fast", FAST), parts(args.tiny), end)
    report.write()
    print(f"\n{failures} checks failed; all figures are in {args.json}")
    return 1 if failures else 0


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    kind = jax.devices()[0].device_kind.lower().replace(" ", "_")
    options.set_defaults(json=RESULTS / f"accelerator_{kind}.json")
    options.add_argument("--tiny", action="store_true", help="everything in small")
    options.add_argument(
        "--minutes", type=float, default=8, help="after these it begins no other times"
    )
    return options.parse_args(arguments)


def checks(tiny: bool) -> Checks:
    return {**muon_checks(48 if tiny else 256), **attention_checks()}


def parts(tiny: bool) -> Parts:
    """First those that decide something."""
    times = Times(TINY if tiny else FULL)
    return {
        "peak": times.peak_of_products,
        "stage, separate": functools.partial(times.stage, separate),
        "stage, stacked": functools.partial(times.stage, stacked),
        **kernel_parts(times),
        "entries of a batch": functools.partial(by_batch, times),
        "torch.optim.Muon": functools.partial(torch_muon, times),
        "gram_newton_schulz": functools.partial(gram_newton_schulz, times),
        "GPT-2, separate": functools.partial(times.gpt2, separate),
        "GPT-2, stacked": functools.partial(times.gpt2, stacked),
        "training step": times.training,
    }


if __name__ == "__main__":
    sys.exit(main())

"""Measures what Muon and MuonClip claim, on this machine, and writes a report.

    python benchmarks/reproduce.py                        # all experiments: hours
    python benchmarks/reproduce.py explosion no_harm
    python benchmarks/reproduce.py --quick                # all of the code, no evidence

Every run that ends is kept in `--out`, so that an interrupted experiment goes on where
it stopped; runs that are there are not trained again. The report is written from them.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


os.environ["JAX_PLATFORMS"] = "cpu"  # as in the report: the runs are small

import jax
from environment import environment
from evidence.lab import Lab, Unfinished
from evidence.plan import Plan
from evidence.report import section, write_report
from evidence.texts import CORPORA


HERE = Path(__file__).parent
LABORATORY = HERE / "evidence"
EXPERIMENTS = (
    "tokens_per_parameter",
    "token_conditions",
    "explosion",
    "no_harm",
    "width_transfer",
    "choices",
    "recipes",
    "warm_up",
    "defaults",
    "candidates",
    "cheaper_iterations",
    "fine_tuning",
    "reinforcement",
    "rate_rule",
    "stress",
    "overhead",
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    add("--quick", action="store_true", help="everything in small, in ten minutes")
    add("--data", type=existing_file, help="a text file in place of both corpora")
    add("--seed", type=seed, default=1, help="the first of those reported; default: 1")
    add("--out", type=Path, help="folder for results, figures and report")
    args = parser.parse_args()
    if unknown := sorted(set(args.experiments) - set(EXPERIMENTS)):
        parser.error(f"no such experiment: {', '.join(unknown)}")
    return args


def existing_file(name: str) -> Path:
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {name}")
    return Path(name)


def seed(value: str) -> int:
    if int(value) < 1:
        raise argparse.ArgumentTypeError("0 is the seed of tuning; from 1 on")
    return int(value)


def main() -> None:
    args = parse_args()
    folder, report, details = places(args)
    corpora = [str(args.data)] if args.data else list(CORPORA)
    plan = Plan(corpora[:1] if args.quick else corpora, folder, args.quick, args.seed)
    # Other seeds are for what is reported: the rates stay those that were tuned.
    known = LABORATORY / "results" / "tuning.jsonl" if args.seed != 1 else None
    lab = Lab(folder, known=known, environment=environment())
    with compiled_once():
        try:
            for name in args.experiments or EXPERIMENTS:
                try:
                    print(f"{name}: {section(name, lab, plan).verdict}")
                except (Unfinished, ModuleNotFoundError) as missing:
                    # Of the experiment's own library, as gymnax: the others go on.
                    print(f"{name}: not finished: {missing}")
        finally:
            lab.close()
            lab.trains = False
            write_report(report, details, EXPERIMENTS, lab, plan)
    print(f"report: {report}")


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """What one process has compiled, the others take over: workers and this one."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The environment is for the workers, which JAX has not been imported in.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        yield


def places(args: argparse.Namespace) -> tuple[Path, Path, Path]:
    """The folder of results and figures, the report, and all experiments: those that
    are committed only for the experiments as they stand."""
    if not (args.out or args.quick or args.data or args.seed != 1):
        details = LABORATORY / "experiments.md"
        return LABORATORY / "results", HERE / "report.md", details
    folder = args.out or Path("runs/reproduce")
    return folder, folder / "report.md", folder / "experiments.md"


if __name__ == "__main__":
    main()

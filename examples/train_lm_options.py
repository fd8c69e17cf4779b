"""The arguments of train_lm.py, without JAX, so that `--help` answers at once."""

import argparse
import functools
from pathlib import Path


OPTIMIZERS = ("muon", "muonclip", "adamw")


def parse_args(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--optimizer", choices=OPTIMIZERS, help="train with this one alone"
    )
    which.add_argument(
        "--compare", action="store_true", help="train with all (default)"
    )
    add_training_arguments(parser)
    parser.add_argument(
        "--quick",
        dest="steps",
        action="store_const",
        const=60,
        help="60 steps, with the rates that are tuned for 300",
    )
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--eval-every", type=positive, default=10)
    add(
        "--checkpoint-every",
        type=positive,
        default=50,
        help="steps, then at the next evaluation; default: %(default)s",
    )
    add("--out", type=Path, default=Path("runs/train_lm"))
    parser.add_argument("--resume", action="store_true", help="go on from --out")
    return parser.parse_args()


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--data", type=existing_file, help="a text file; default: the standard library")
    add("--steps", type=positive, default=300)
    add("--batch-size", type=positive, default=32)
    add("--context", type=positive, default=64)
    add("--layers", type=positive, default=4)
    add("--width", type=positive, default=128)
    add("--heads", type=positive, default=4)
    add(
        "--learning-rate",
        type=float,
        default=1.2e-2,
        help="of muon and muonclip: twice AdamW's; default: %(default)s",
    )
    add("--adam-learning-rate", type=float, default=6e-3)
    add("--schedule", choices=("linear", "constant"), default="linear")
    add("--weight-decay", type=float, default=0.5)
    add("--threshold", type=float, default=6.0)
    add("--alpha", type=float, default=0.5)
    add("--seed", type=int, default=0)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return int(text)


def existing_file(name: str) -> Path:
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {name}")
    return Path(name)

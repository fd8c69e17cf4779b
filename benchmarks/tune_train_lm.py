"""Tunes the learning rates of examples/train_lm.py and prints the grid.

    python benchmarks/tune_train_lm.py

Each cell is one run of the example at its default length; finished cells are kept in
`--out`, so that an interrupted grid goes on where it stopped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from environment import environment


EXAMPLE = Path(__file__).parent.parent / "examples" / "train_lm.py"

# Every grid brackets its best value. Muon keeps AdamW's best rate for its AdamW side.
GRIDS = {
    "adamw": ("--adam-learning-rate", (1.5e-3, 3e-3, 6e-3, 1.2e-2)),
    "muon": ("--learning-rate", (1e-2, 2e-2, 4e-2)),
}
WEIGHT_DECAYS = (0.1, 0.3, 0.5, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tune_train_lm"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(environment())
    for optimizer, (flag, rates) in GRIDS.items():
        print(f"\nvalidation loss of {optimizer}, {flag} by --weight-decay\n")
        print("| | " + " | ".join(f"{decay:g}" for decay in WEIGHT_DECAYS) + " |")
        print("|---" * (len(WEIGHT_DECAYS) + 1) + "|")
        for rate in rates:
            losses = [
                cell(optimizer, flag, rate, decay, args) for decay in WEIGHT_DECAYS
            ]
            print(
                f"| {rate:g} | " + " | ".join(f"{x:.4f}" for x in losses) + " |",
                flush=True,
            )


def cell(optimizer: str, flag: str, rate: float, decay: float, args) -> float:
    """The final validation loss of one run."""
    out = args.out / f"{optimizer}-{rate:g}-{decay:g}-{args.steps}"
    if not (out / "results.json").exists():
        options = {
            flag: rate,
            "--weight-decay": decay,
            "--steps": args.steps,
            "--out": out,
        }
        command = [sys.executable, EXAMPLE, "--optimizer", optimizer]
        command += [str(word) for option in options.items() for word in option]
        subprocess.run(command, check=True, capture_output=True)
    history = json.loads((out / "results.json").read_text())[optimizer]
    return history[-1]["validation_loss"]


if __name__ == "__main__":
    main()

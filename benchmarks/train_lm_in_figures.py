"""The figures and pictures of examples/train_lm.py that README and manual show.

    python benchmarks/train_lm_in_figures.py --json benchmarks/results/train_lm.json
    python benchmarks/train_lm_in_figures.py --draw   # the pictures from that file

Runs the example for each optimizer and seed. Finished runs are kept in `--out`, so that
an interrupted command goes on where it stopped.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.intervals import interval
from tables import kept, parser, Report


EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))
from train_lm_report import draw, History, NAMES, steps_to  # noqa: E402


THRESHOLD, RATES = 6.0, {"muon": 0.012, "muonclip": 0.012, "adamw": 0.006}
RECORDED = ("step", "validation_loss", "max_logit", "clipped")
COLUMNS = {
    "": "",
    "loss": ".4f",
    "steps to AdamW's": ".0f",
    "share": ".1%",
    "largest logit": ".1f",
    "last logit": ".1f",
    "threshold": "g",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/train_lm_in_figures"))
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--draw", action="store_true", help="run nothing")
    args = options.parse_args()
    if not args.draw:
        write(Report(args), args.out, args.seeds)
    # Side by side for a screen, one above the other for a phone.
    for columns, name in ((2, "comparison"), (1, "comparison_narrow")):
        file = EXAMPLES / f"{name}.png"
        draw(curves(), file, threshold=THRESHOLD, rates=RATES, columns=columns)


def write(report: Report, out: Path, seeds: int) -> None:
    """Writes a table of the first seed, one of all seeds, and one of the curves."""
    histories = results(0, tuple(RATES), out)
    table = report.table("AdamW, Muon and MuonClip", COLUMNS)
    for name, history in histories.items():
        logits = [record["max_logit"] for record in history]
        table.add(
            NAMES[name],
            history[-1]["validation_loss"],
            *steps_and_share(histories, name),
            *(max(logits), logits[-1]),
            THRESHOLD if name == "muonclip" else None,
        )
    shares = [
        steps_and_share(results(seed, ("muon", "adamw"), out), "muon")[1]
        for seed in range(seeds)
    ]
    table = report.table("Seeds", {"seed": "", "share": ".1%", "half": ".1%"})
    for seed, share in enumerate(shares):
        table.add(str(seed), share, None)
    table.add("mean", *interval(shares))
    table = report.table("Curves", {"optimizer": ""} | dict.fromkeys(RECORDED, "g"))
    for name, history in histories.items():
        for record in history:
            table.add(name, *(record[key] for key in RECORDED))
    report.write()


def results(seed: int, optimizers: Sequence[str], out: Path) -> dict[str, History]:
    """The history of each optimizer."""
    flags = {"--seed": seed}
    return {x: history_of(x, out / f"{x}-{seed}", flags) for x in optimizers}


def history_of(optimizer: str, folder: Path, flags: Mapping[str, Any]) -> History:
    """That of a run of the example, which is trained if the folder has none."""
    file = folder / "results.json"
    if not file.exists():
        flags = {"--optimizer": optimizer, **flags, "--out": folder}
        command = [sys.executable, EXAMPLES / "train_lm.py"]
        command += [word for flag in flags.items() for word in flag]
        subprocess.run(list(map(str, command)), check=True)
    return json.loads(file.read_text())[optimizer]


def steps_and_share(histories: dict[str, History], name: str) -> tuple[float, float]:
    """The steps to AdamW's final loss, and their share of its steps."""
    end = histories["adamw"][-1]
    steps = steps_to(histories[name], end["validation_loss"])
    if steps is None:
        raise ValueError(f"{name} did not reach AdamW's final loss")
    return steps, steps / end["step"]


def curves() -> dict[str, History]:
    """The histories that are kept."""
    found: dict[str, History] = {}
    for name, *numbers in kept("train_lm", "Curves").rows:
        record = {key: x for key, x in zip(RECORDED, numbers, strict=True)}
        found.setdefault(str(name), []).append(record)
    return found


if __name__ == "__main__":
    main()

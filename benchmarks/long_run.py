"""A long run that is killed 12 times and resumed, against the same run unbroken.

    python benchmarks/long_run.py --json benchmarks/results/long_run.json

The transformer of examples/train_sharded.py takes 3,000 steps of 2 micro-batches on 8
simulated devices, with momentum in 8 bits, a clip that acts, and a checkpoint every 199
micro-batches, so that half of them are within a step. Each kill is a SIGKILL at a
random place. One run is always resumed on 8 devices, another on 8, 4 and 2 in turn. On
another mesh sums round in another order, and training amplifies that: how much, an
unbroken run on 4 devices says.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pictures import panels
from tables import parser, Report


EXAMPLES = Path(__file__).parent.parent / "examples"
MICRO, KILLS, EVERY, TOGETHER, THRESHOLD = 2, 12, 199, 100, 2.0
ARGUMENTS = ["--width=32", "--layers=2", "--heads=4", "--context=32", "--batch-size=8"]
ARGUMENTS += ["--tensor=2", f"--threshold={THRESHOLD}", f"--checkpoint-every={EVERY}"]
WHOLE = "unbroken, 8 devices"
RUNS = {  # which devices in turn, and whether it is killed
    WHOLE: ((8,), False),
    "killed, 8 devices": ((8,), True),
    "killed, 8, 4 and 2 devices": ((8, 4, 2), True),
    "unbroken, 4 devices": ((4,), False),
}
COLUMNS = {
    "run": "",
    "kills": "d",
    "micro-batches again": "d",
    "peak memory, MB": ".0f",
    "of it after 300, MB": ".0f",
    "compiled after 300": "d",
    "steps that clip": "d",
    "largest logit over the threshold": ".2f",
    "after 100 steps": ".2f",
    "last loss": ".3f",
    "off, one step": ".1e",
    "off, mean of 50": ".1e",
}


def train(arguments: Sequence[str]) -> None:
    """Runs train_sharded.py with micro-batches; logs memory and compiled programs."""
    import jax
    import train_sharded
    from train_lm_loop import read

    import muonclip_jax as mc

    make, records, compiled = train_sharded.make_optimizer, train_sharded.records, []

    def accumulating(name: str, args: Any, **options: Any) -> Any:
        tx = make(name, args, **options, mu_dtype="int8")
        return mc.multi_steps(tx, MICRO, model=read(args), **options)

    def counted(*args: Any) -> list[dict[str, Any]]:
        found = records(*args)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found[-1] |= {"megabytes": memory, "programs": len(compiled)}
        return found

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    train_sharded.make_optimizer, train_sharded.records = accumulating, counted
    train_sharded.train(train_sharded.parse_args(arguments))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=3000)
    options.add_argument("--seed", type=int, default=0, help="of the kills")
    options.add_argument("--picture", type=Path)
    args = options.parse_args()
    batches = MICRO * args.steps
    places = range(batches // 20, batches - batches // 20)
    kills = sorted(random.Random(args.seed).sample(places, KILLS))
    report, curves = Report(args), {}
    table = report.table("Long run", COLUMNS)
    for name, (devices, killed) in RUNS.items():
        parts = logs(batches, kills if killed else [], devices)
        curves[name] = parts[-1]
        table.add(name, *measured(parts, curves[WHOLE]))
    report.write()
    if args.picture:
        draw(args.picture, curves, kills)


def logs(
    batches: int, kills: Sequence[int], devices: Sequence[int]
) -> list[list[dict[str, Any]]]:
    """The log as it is after each part: at a kill, and at the end."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i, last in enumerate([*kills, batches]):
            command = [sys.executable, __file__, "--train", *ARGUMENTS]
            command += [f"--steps={batches}", f"--out={folder}/run"]
            command += [f"--simulate-devices={devices[i % len(devices)]}"]
            path = os.pathsep.join([str(EXAMPLES), *sys.path])
            with Path(folder, "output").open("a") as output:
                run = subprocess.Popen(
                    [*command, *["--resume"] * (i > 0)],
                    env=os.environ | {"PYTHONPATH": path},
                    stderr=output,
                )
            log = Path(folder, "run", "losses.jsonl")
            while run.poll() is None and len(lines(log)) < last:
                time.sleep(0.05)
            if last < batches:
                run.send_signal(signal.SIGKILL)
            if run.wait() not in (0, -signal.SIGKILL):
                raise SystemExit(Path(folder, "output").read_text()[-2000:])
            found.append([json.loads(line) for line in lines(log)])
    return found


def lines(log: Path) -> list[str]:
    """The whole lines of a log, which may be growing."""
    text = log.read_text() if log.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def measured(
    parts: Sequence[Sequence[dict[str, Any]]], whole: Sequence[dict[str, Any]]
) -> tuple[float, ...]:
    """A row of the table, without the run's name."""
    last = parts[-1]
    losses, goal = np.array([[x["loss"] for x in log] for log in (last, whole)])
    # A part begins at the checkpoint before; its first save compiles the last program.
    begins = [0, *(len(part) // EVERY * EVERY for part in parts[:-1])]
    memory, compiled = [], []
    for begin, part in zip(begins, parts, strict=True):
        seen = [x for x in part[begin + 300 :] if "programs" in x] or part[-1:]
        memory.append([x.get("megabytes", 0) for x in (seen[0], seen[-1])])
        compiled.append(seen[-1].get("programs", 0) - seen[0].get("programs", 0))
    logits = np.array([x["max_logit"] for x in last]) / THRESHOLD
    return (
        len(parts) - 1,
        sum(len(part) for part in parts[:-1]) - sum(begins),
        max(end for _, end in memory),
        max(end - begin for begin, end in memory),
        sum(compiled),
        sum(x["clipped"] > 0 for x in last) // MICRO,
        logits.max(),
        logits[100 * MICRO :].max(),
        losses[-TOGETHER:].mean(),
        largest_difference(losses, goal),
        largest_difference(means(losses), means(goal)),
    )


def means(losses: np.ndarray) -> np.ndarray:
    return losses.reshape(-1, TOGETHER).mean(axis=1)


def largest_difference(losses: np.ndarray, goal: np.ndarray) -> float:
    return float(np.abs(losses / goal - 1).max())


def draw(
    file: Path, curves: dict[str, list[dict[str, Any]]], kills: Sequence[int]
) -> None:
    """How far each loss is from the unbroken run's, and the largest logits."""
    titles = ["off the unbroken run's loss, mean of 50 steps"]
    titles += ["largest logit / threshold"]
    goal = means(np.array([x["loss"] for x in curves[WHOLE]]))
    steps = TOGETHER * (np.arange(len(goal)) + 0.5) / MICRO
    with panels(file, titles, xlabel="step") as axes:
        for i, (name, log) in enumerate(curves.items()):
            losses = means(np.array([x["loss"] for x in log]))
            logits = np.array([x["max_logit"] for x in log]).reshape(-1, TOGETHER)
            style: dict[str, Any] = dict(label=name, linestyle=["-", "--", "-", ":"][i])
            axes[0].plot(steps, np.abs(losses / goal - 1), **style)
            axes[1].plot(steps, logits.max(axis=1) / THRESHOLD, **style)
        for one in axes:
            for kill in kills:
                one.axvline(kill / MICRO, color="black", linewidth=0.5, alpha=0.4)


if __name__ == "__main__":
    train(sys.argv[2:]) if sys.argv[1:2] == ["--train"] else main()

"""Command lines of train_sharded.py on a small model, and the files it writes."""

import json
import pathlib
import sys

from helpers import EXAMPLES, script_environment


STEPS = 20
SMALL = [f"--steps={STEPS}", "--batch-size=8", "--context=16", "--layers=1"]
SMALL += ["--width=16", "--heads=4", "--threshold=0.3"]  # low, so that the clip acts
MESHES = {
    "one": ["--simulate-devices=1"],
    "two": ["--simulate-devices=2"],
    "four": ["--simulate-devices=4"],
    "fsdp": ["--simulate-devices=8"],
    "tensor": ["--simulate-devices=8", "--fsdp=4", "--tensor=2"],
    "processes": ["--num-processes=2", "--simulate-devices=4"],
}


def make_command(workplace, out, *flags):
    """Arguments of `subprocess.run`: the script, its compiled programs being kept."""
    (workplace / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog. " * 3000
    )
    script = [sys.executable, EXAMPLES / "train_sharded.py", *SMALL]
    line = [*script, "--data", workplace / "text.txt", "--out", out, *flags]
    environment = script_environment() | {"JAX_LOG_COMPILES": "1"}
    return dict(args=[*map(str, line)], env=environment)


def killed(command, before, process=0):
    """The same command, with a process that is killed before the given step."""
    script = pathlib.Path(__file__).with_name("killed_train_sharded.py")
    where = {"KILLED_BEFORE": str(before), "KILLED_PROCESS": str(process)}
    where["PYTHONPATH"] = str(EXAMPLES)
    python, _, *flags = command["args"]
    return dict(args=[python, str(script), *flags], env=command["env"] | where)


def lines(out):
    return (out / "losses.jsonl").read_text().splitlines()


def read(out):
    return [json.loads(line) for line in lines(out)]


def losses(out):
    records = read(out)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


def saved_step(out):
    """The step of the newest finished checkpoint."""
    return max(int(file.name) for file in out.iterdir() if file.name.isdigit())

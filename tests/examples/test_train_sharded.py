"""The multi-device example: meshes, processes and kills leave the losses alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import train_sharded
from helpers import EXAMPLES, script_environment


STEPS = 20
SMALL = [f"--steps={STEPS}", "--batch-size=8", "--context=16", "--layers=1"]
SMALL += ["--width=16", "--heads=4", "--threshold=0.3"]  # low, so that the clip acts
MESHES = {
    "one": ["--simulate-devices=1"],
    "four": ["--simulate-devices=4"],
    "fsdp": ["--simulate-devices=8"],
    "tensor": ["--simulate-devices=8", "--fsdp=4", "--tensor=2"],
    "processes": ["--num-processes=2"],
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    text = "the quick brown fox jumps over the lazy dog. " * 3000
    (folder / "text.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def command(workplace):
    """A command line and environment of the script, compiled programs being kept."""
    environment = script_environment() | {"JAX_LOG_COMPILES": "1"}
    script = [sys.executable, EXAMPLES / "train_sharded.py", *SMALL]

    def make(out, *flags):
        line = [*script, "--data", workplace / "text.txt", "--out", out, *flags]
        return dict(args=[*map(str, line)], env=environment)

    return make


@pytest.fixture(scope="module")
def straight(workplace, command):
    """Uninterrupted runs by the name of their mesh, each run when first asked for."""
    runs = {}

    def run(mesh):
        if mesh not in runs:
            out = workplace / mesh
            flags = [*MESHES[mesh], "--checkpoint-every=10", "--keep=2"]
            result = subprocess.run(
                **command(out, *flags), capture_output=True, text=True
            )
            assert result.returncode == 0, result.stderr
            runs[mesh] = out, result.stderr
        return runs[mesh]

    return run


def read(out):
    return [json.loads(line) for line in (out / "losses.jsonl").open()]


def losses(out):
    records = read(out)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


@pytest.mark.parametrize("mesh", ["fsdp", "tensor", "processes"])
def test_losses_are_those_of_one_device(straight, mesh):
    (one, _), (many, _) = straight("one"), straight(mesh)
    assert losses(one)[-1] < 0.8 * losses(one)[0]
    assert sum(record["clipped"] for record in read(one)) > 0
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-4)


@pytest.mark.parametrize("mesh", ["one", "four", "processes"])
def test_checkpoint_of_eight_devices_goes_on_elsewhere(
    straight, command, tmp_path, mesh
):
    whole, _ = straight("fsdp")
    half = shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(half / str(STEPS))
    resume = command(half, *MESHES[mesh], "--resume")
    result = subprocess.run(**resume, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Compiling jit(create_state)" not in result.stderr
    assert read(half)[:10] == read(whole)[:10]
    assert read(half)[10:] != read(whole)[10:]
    np.testing.assert_allclose(losses(half), losses(whole), rtol=1e-4)


def test_step_compiles_once(straight):
    _, log = straight("fsdp")
    for name in ("create_state", "train_step"):
        assert len(re.findall(rf"Compiling jit\({name}\)", log)) == 1


def run_and_kill(arguments, out, is_time, delay):
    """Kills the script `delay` seconds after it is time; whether amid a save."""
    process = subprocess.Popen(**arguments, stdout=subprocess.PIPE, stderr=-2)
    try:
        while not is_time():
            assert process.poll() is None, process.stdout.read().decode()
            time.sleep(1e-3)
        time.sleep(delay)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    return bool(unfinished(out))


def unfinished(out):
    return [*out.glob("*checkpoint-tmp*")]


def logged(out):
    file = out / "losses.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_often(command, out, mesh, kills, seed):
    """Kills and resumes; every second time while a checkpoint is being written."""
    generator = np.random.default_rng(seed)
    resume = [*MESHES[mesh], "--resume", "--log-every=1"]
    amid_saves = 0
    for kill in range(kills):
        # One kill for each part of the run, not after its end.
        step = int((kill + generator.uniform()) * (STEPS - 3) / kills)
        in_save = kill % 2 == 1

        def is_time(step=step, in_save=in_save):
            return logged(out) > step and (not in_save or unfinished(out))

        arguments = command(out, *resume, "--checkpoint-every=2")
        delay = generator.uniform(0, 0.005 if in_save else 0.05)
        amid_saves += run_and_kill(arguments, out, is_time, delay)
    subprocess.run(**command(out, *resume), check=True, capture_output=True)
    return amid_saves


@pytest.mark.parametrize(
    "mesh, kills",
    [
        ("fsdp", 2),
        pytest.param("fsdp", 10, marks=pytest.mark.slow),
        pytest.param("processes", 10, marks=pytest.mark.slow),
    ],
)
def test_killed_run_repeats_itself_bit_for_bit(
    straight, command, tmp_path, mesh, kills
):
    whole, _ = straight(mesh)
    out = tmp_path / "killed"
    assert kill_often(command, out, mesh, kills, seed=kills) > 0
    assert (out / "losses.jsonl").read_text() == (whole / "losses.jsonl").read_text()
    assert not unfinished(out)


def test_resuming_with_other_settings_is_refused(straight, command):
    out, _ = straight("fsdp")
    flags = ["--simulate-devices=1", "--resume", "--threshold=7"]
    result = subprocess.run(**command(out, *flags), capture_output=True, text=True)
    assert result.returncode and "--threshold was 0.3, is 7.0" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--fsdp=3", "--fsdp 3 times --tensor 1 is not the number of devices, 8"),
        ("--tensor=3", "--fsdp 2 times --tensor 3 is not the number of devices, 8"),
        ("--tensor=2 --heads=1", "--heads 1 is not divisible by --tensor 2"),
        ("--width=20", "--width 20 is not divisible by --fsdp 8"),
        ("--width=24 --heads=5", "--width 24 is not divisible by --heads 5"),
        ("--batch-size=12", "--batch-size 12 is not divisible by --fsdp 8"),
        ("--num-processes=3", "--simulate-devices 8 is not divisible by --num-proc"),
    ],
)
def test_flags_that_do_not_fit(monkeypatch, flags, message):
    line = ["--num-processes=2", "--simulate-devices=8", *SMALL, *flags.split()]
    monkeypatch.setattr(sys, "argv", ["train_sharded.py", *line])
    with pytest.raises(SystemExit, match=message) as error:
        train_sharded.main()
    assert "\n" not in str(error.value)


def test_error_is_one_line(command, tmp_path):
    flags = command(tmp_path / "run", "--simulate-devices=2", "--fsdp=3")
    result = subprocess.run(**flags, capture_output=True, text=True)
    assert result.returncode and len(result.stderr.splitlines()) == 1
    assert "--fsdp 3" in result.stderr


def test_failing_process_ends_the_run(command, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    flags = [*MESHES["processes"], f"--data={tmp_path / 'text.txt'}"]
    result = subprocess.run(
        **command(tmp_path / "run", *flags), capture_output=True, text=True, timeout=120
    )
    assert result.returncode
    assert "too few for context 16" in result.stderr
    assert "of 2 ended with exit code 1; the others were stopped" in result.stderr


LAUNCH = """
import os, signal, sys, time
import jax
import processes

def wait():
    os.write(1, b"started\\n")  # in one piece, beside that of the other
    time.sleep(600)

def die():
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

if __name__ == "__main__":
    processes.launch({}, 2)
"""


@pytest.fixture
def start(tmp_path):
    def start(target):
        (tmp_path / "script.py").write_text(LAUNCH.format(target))
        environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
        return subprocess.Popen(
            [sys.executable, tmp_path / "script.py"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_killed_process_takes_the_others_along(start):
    with start("die") as parent:
        # The children hold both pipes, so this returns when none is left.
        _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert errors.endswith(
        "process 1 of 2 ended with exit code -9; the others were stopped\n"
    )


def test_processes_end_with_the_one_that_started_them(start):
    with start("wait") as parent:
        for _ in range(2):
            assert parent.stdout.readline() == "started\n"
        parent.kill()
        parent.communicate(timeout=60)

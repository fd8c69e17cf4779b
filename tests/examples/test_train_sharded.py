"""The multi-device example: meshes, processes and kills leave the losses alone."""

import functools
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import train_sharded
from sharded_script import (
    killed,
    lines,
    losses,
    make_command,
    MESHES,
    read,
    saved_step,
    SMALL,
    STEPS,
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def command(workplace):
    return functools.partial(make_command, workplace)


@pytest.fixture(scope="module")
def straight(workplace, command):
    """Uninterrupted runs by the name of their mesh, each run when first asked for."""
    runs = {}

    def on(mesh):
        if mesh not in runs:
            out = workplace / mesh
            flags = [*MESHES[mesh], "--checkpoint-every=10", "--keep=2"]
            runs[mesh] = out, run(command(out, *flags))
        return runs[mesh]

    return on


# A float32 sum of n terms in another order differs by about sqrt(n) roundings. The
# longest sum, over the 256 bytes of the vocabulary, stands for each step; steps add up.
TOLERANCE = np.arange(1, STEPS + 1) * np.sqrt(256) * np.finfo(np.float32).eps


def assert_close(actual, expected):
    difference = np.abs(np.divide(actual, expected) - 1)
    np.testing.assert_array_less(difference, TOLERANCE)


@pytest.mark.parametrize("mesh", ["fsdp", "tensor", "processes"])
@pytest.mark.more
def test_losses_are_those_of_one_device(straight, mesh):
    (one, _), (many, _) = straight("one"), straight(mesh)
    assert losses(one)[-1] < 0.8 * losses(one)[0]
    assert sum(record["clipped"] for record in read(one)) > 0
    assert_close(losses(many), losses(one))


def run(arguments, end=0):
    result = subprocess.run(**arguments, capture_output=True, text=True)
    assert result.returncode == end, result.stderr
    return result.stderr


def run_until_killed(arguments, mesh, before):
    if mesh != "processes":
        return run(killed(arguments, before), -signal.SIGKILL)
    errors = run(killed(arguments, before, process=1), end=1)
    assert "process 1 of 2 was killed by SIGKILL" in errors
    return errors


@pytest.mark.parametrize(
    "meshes",
    [
        "processes tensor four one",
        pytest.param("two tensor four one", marks=pytest.mark.slow),
        pytest.param(
            "one processes fsdp two processes four tensor", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.more
def test_killed_run_continues_on_other_meshes(straight, command, tmp_path, meshes):
    whole, _ = straight("one")
    out, meshes = tmp_path / "run", meshes.split()
    flags = ["--resume", "--log-every=1", "--checkpoint-every=1"]
    kept = []  # the lines of the log that the next mesh must leave alone
    for number, mesh in enumerate(meshes, 1):
        arguments = command(out, *MESHES[mesh], *flags)
        before = number * STEPS // len(meshes)
        last = number == len(meshes)
        errors = run(arguments) if last else run_until_killed(arguments, mesh, before)
        assert ("Compiling jit(create_state)" in errors) == (number == 1)
        assert lines(out)[: len(kept)] == kept
        kept, before_it = lines(out)[: saved_step(out)], kept
        assert len(kept) > len(before_it)  # every mesh has its part in the run
    assert losses(out) != losses(whole)  # other orders of summation
    assert_close(losses(out), losses(whole))


@pytest.mark.more
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
@pytest.mark.more
def test_killed_run_repeats_itself_bit_for_bit(
    straight, command, tmp_path, mesh, kills
):
    whole, _ = straight(mesh)
    out = tmp_path / "killed"
    assert kill_often(command, out, mesh, kills, seed=kills) > 0
    assert (out / "losses.jsonl").read_text() == (whole / "losses.jsonl").read_text()
    assert not unfinished(out)


@pytest.mark.more
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

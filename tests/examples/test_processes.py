"""A process of the multi-device example that dies ends the others, which say so."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest
from helpers import EXAMPLES, more
from sharded_script import killed, make_command, MESHES, read


LIMIT = 60  # seconds, as the script's documentation has it
REMEDY = "To continue from the last checkpoint, run the same command with --resume"
STOPPED = f"; the others were stopped. {REMEDY}.\n"


def start(arguments, **environment):
    return subprocess.Popen(
        arguments["args"],
        env=arguments["env"] | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def hosts():
    """The environments of two hosts, as Slurm describes them to JAX."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost"}
    slurm |= {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2"}
    slurm |= {"JAX_COORDINATOR_ADDRESS": address}
    return [slurm | {"SLURM_PROCID": str(index)} for index in range(2)]


def run_on_hosts(arguments, victim):
    """The errors of the survivor and of the victim, and the time between their ends."""
    processes = [start(arguments, **environment) for environment in hosts()]
    outputs = [process.communicate(timeout=300) for process in processes]
    ended = time.time()
    assert [process.returncode for process in processes] == [1, 1], outputs
    when, errors = outputs[victim]
    return outputs[1 - victim][1], errors, ended - float(when.split()[-1])


def assert_survivor_explains(errors, limit):
    message = errors.splitlines()[-1]
    pattern = r"the process on this host (ended with exit code 1|was killed by SIGABRT)"
    assert re.match(pattern, message)
    assert "the process on another host died first" in message
    assert message.endswith(f"within {limit} seconds of that. {REMEDY} on every host.")


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.more
def test_killed_process_ends_those_of_other_hosts(tmp_path, victim):
    out = tmp_path / "run"
    flags = ["--distributed", "--simulate-devices=1", "--log-every=1"]
    command = killed(make_command(tmp_path, out, *flags), before=10, process=victim)
    survivor, killed_one, seconds = run_on_hosts(command, victim)
    assert [record["step"] for record in read(out)][:9] == [*range(1, 10)]
    assert seconds < LIMIT
    assert_survivor_explains(survivor, LIMIT)
    assert "\nthe process on this host was killed by SIGKILL. " in killed_one


@pytest.mark.more
def test_failing_process_ends_the_run(tmp_path):
    flags = [*MESHES["processes"], "--context=200000"]
    command = make_command(tmp_path, tmp_path / "run", *flags)
    result = subprocess.run(**command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "too few for context 200000" in result.stderr
    assert result.stderr.endswith("of 2 ended with exit code 1" + STOPPED)


SCRIPT = """
import os, signal, sys, time
import jax
import processes

processes.HEARTBEAT_TIMEOUT = {timeout}

def wait():
    os.write(1, b"started\\n")  # in one piece, whatever the other writes
    time.sleep(600)

def die():
    if jax.process_index() == 1:
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

def fail():
    if jax.process_index() == 1:
        raise RuntimeError("something failed")
    time.sleep(600)

if __name__ == "__main__":
    processes.{call}
"""


@pytest.fixture
def script(tmp_path):
    """The command of a script that starts processes which do no collective."""

    def script(call, timeout=30):
        file = tmp_path / "script.py"
        file.write_text(SCRIPT.format(call=call, timeout=timeout))
        environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
        return dict(args=[sys.executable, str(file)], env=environment)

    return script


@pytest.mark.parametrize("timeout", [5, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.more
def test_silence_of_another_host_is_noticed(script, timeout):
    """As on an accelerator, where a collective waits for the dead without an error."""
    command = script("launch_on_host(die)", timeout)
    survivor, _, seconds = run_on_hosts(command, victim=1)
    assert timeout / 2 < seconds < 2 * timeout
    assert_survivor_explains(survivor, 2 * timeout)


@pytest.mark.more
@pytest.mark.parametrize(
    "target, end",
    [("die", "was killed by SIGKILL"), more("fail", "ended with exit code 1")],
)
def test_process_that_ends_takes_the_waiting_along(script, target, end):
    with start(script(f"launch({target}, 2)")) as parent:
        _, errors = parent.communicate(timeout=LIMIT)
    assert parent.returncode == 1
    assert errors.endswith(f"\nprocess 1 of 2 {end}{STOPPED}")
    assert (target == "fail") == ("RuntimeError: something failed" in errors)


@pytest.mark.more
def test_processes_end_with_the_one_that_started_them(script):
    with start(script("launch(wait, 2)")) as parent:
        for _ in range(2):
            assert parent.stdout.readline() == "started\n"
        parent.kill()
        parent.communicate(timeout=LIMIT)

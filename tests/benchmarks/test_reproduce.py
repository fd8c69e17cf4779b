"""The script that reproduces, run as a user runs it but small."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from evidence.experiments import no_harm
from evidence.lab import Lab
from evidence.plan import Plan
from helpers import run_script, script_environment


SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "reproduce.py"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a quick experiment that was killed after its first results."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    command = [sys.executable, SCRIPT, "--quick", "no_harm", "--out", out]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        env=script_environment(),
    )
    wait_for(lambda: lines(out), seconds=300)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return out


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def lines(out):
    files = sorted(out.glob("*.jsonl")) if out.exists() else []
    return [line for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(killed):
    before = lines(killed)
    result = run_script(SCRIPT, "--quick", "no_harm", "--out", killed)
    return killed, before, result


@pytest.mark.more
def test_interrupted_experiment_goes_on_where_it_stopped(finished):
    out, before, _ = finished
    after = lines(out)
    assert before and set(before) <= set(after)
    keys = [json.loads(line)["run"] for line in after]
    assert len(keys) == len(set(keys)) > len(before)
    for line in map(json.loads, after):
        assert "commit" in line["environment"]
        assert line["curve"][-1][0] == json.loads(line["run"])["steps"]
        assert line["curve"][-1][1] < 6


@pytest.mark.more
def test_report_says_what_came_out_and_what_is_missing(finished):
    out, _, result = finished
    report = (out / "experiments.md").read_text()
    assert "Not finished: " in (out / "report.md").read_text()
    assert "## No harm" in report and "**Verdict: " in report
    assert "| explosion | not finished: " in report
    assert "(./no_harm.png)" in report  # alongside the page
    assert (out / "no_harm.png").read_bytes().startswith(b"\x89PNG")
    assert "no_harm: " in result.stdout and "run" in result.stderr


@pytest.mark.more
def test_finished_runs_are_not_trained_again(finished):
    out, _, _ = finished
    lab = Lab(out, trains=False)
    section = no_harm.experiment(lab, Plan(["code"], out, quick=True))
    assert f"**Verdict: {section.verdict}" in (out / "experiments.md").read_text()


@pytest.mark.more
@pytest.mark.skipif(
    importlib.util.find_spec("gymnax") is not None, reason="gymnax is installed"
)
def test_an_experiment_whose_library_is_missing_does_not_take_the_others_along(
    tmp_path,
):
    names = ["reinforcement", "explosion"]
    result = run_script(SCRIPT, "--quick", *names, "--out", tmp_path / "out")
    assert "reinforcement: not finished: No module named 'gymnax'" in result.stdout
    assert "explosion: " in result.stdout.replace("explosion: not finished", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_charm"], "no such experiment: no_charm"),
        (["--data", "missing.txt"], "no such file: missing.txt"),
    ],
)
def test_bad_arguments_are_answered(arguments, message):
    result = run_script(SCRIPT, *arguments, check=False)
    assert result.returncode == 2 and message in result.stderr

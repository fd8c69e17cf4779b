"""What is said of a run that was killed comes from its logs, counted by hand."""

import long_run
import pytest


def records(steps, programs, megabytes, loss=2.0):
    """A log whose every tenth line has memory and programs, as the script writes it."""
    lines = [dict(loss=loss, max_logit=1.0, clipped=0) for _ in range(steps)]
    for line in lines[9::10]:
        line |= dict(programs=programs, megabytes=megabytes)
    return lines


def test_a_run_that_was_killed_once():
    whole = records(1000, programs=7, megabytes=100.0)
    last = records(1000, programs=5, megabytes=120.0)
    # After the checkpoint at 398 the second part compiled until its 60th step, took
    # memory to the end, clipped two steps of two batches, and one loss is 1 % off.
    for line in last[398:450]:
        line |= {"programs": 3} if "programs" in line else {}
    last[-1] |= dict(megabytes=150.0, loss=2.02)
    for i in (900, 901, 904, 905):
        last[i]["clipped"] = 1
    last[50]["max_logit"], last[950]["max_logit"] = 5.0, 2.5
    first = records(420, programs=5, megabytes=100.0)
    row = long_run.measured([first, last], whole)
    names = [name for name in long_run.COLUMNS if name != "run"]
    found = dict(zip(names, row, strict=True))
    assert found["kills"] == 1
    assert found["micro-batches again"] == 420 - 398
    assert found["peak memory, MB"] == 150
    assert found["of it after 300, MB"] == 30
    assert found["compiled after 300"] == 0
    assert found["steps that clip"] == 2
    assert found["largest logit over the threshold"] == 5 / long_run.THRESHOLD
    assert found["after 100 steps"] == 2.5 / long_run.THRESHOLD
    assert found["last loss"] == pytest.approx(2 + 0.02 / 100)
    assert found["off, one step"] == pytest.approx(0.01)
    assert found["off, mean of 50"] == pytest.approx(0.01 / 100)

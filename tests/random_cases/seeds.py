"""Families of random cases: a test for every block of seeds.

`MUONCLIP_FUZZ_SEED` moves the first seed, which the name of every test shows.
"""

import contextlib
import os

import pytest


FIRST = int(os.environ.get("MUONCLIP_FUZZ_SEED", "0"))
BLOCK = 5


def family(check, cases, quick=BLOCK, always=0):
    """The test that calls `check(seed)` for so many seeds.

    `.ci/run` runs the first, as many as `quick`; `pytest` alone as many as `always`.
    """

    def test(seeds):
        for seed in seeds:
            check(seed)

    starts = range(FIRST, FIRST + cases, BLOCK)
    blocks = [range(start, min(start + BLOCK, FIRST + cases)) for start in starts]
    tests = [
        pytest.param(
            block,
            id=f"seeds {block[0]} to {block[-1]}",
            marks=mark_of(block[0] - FIRST, quick, always),
        )
        for block in blocks
    ]
    for mark in (
        pytest.mark.usefixtures("fast_compilation"),
        pytest.mark.parametrize("seeds", tests),
    ):
        test = mark(test)
    return test


def mark_of(start, quick, always):
    if start >= quick:
        return pytest.mark.slow
    return pytest.mark.more if start >= always else ()


@contextlib.contextmanager
def told(seed, **case):
    """Failures say which case it was, and how it was drawn."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        message = f"seed {seed}, {case}: {type(error).__name__}: {error}"
        raise AssertionError(message) from error


def pick(generator, *choices):
    """One of the choices, as it is: NumPy would make arrays of them."""
    return choices[generator.integers(len(choices))]


def chance(generator, probability):
    return bool(generator.random() < probability)

"""Functions written to mislead a reading: nothing may be wrong without a word."""

import pytest
from adversaries import CASES
from by_numbers import verdict_of


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_right_and_what_is_not_is_said(name):
    verdict = verdict_of(CASES[name])
    assert not verdict.is_fault, f"{verdict.kind}: {verdict.why}"

"""What stops CI, where a compiler plans more than is written down."""

import argparse

import guards
import pytest


def test_a_figure_may_grow_by_a_fifth():
    assert guards.within("x", 119.0, 100.0).startswith("ok: x")
    assert guards.within("x", 121.0, 100.0).startswith("too much: x")


@pytest.mark.parametrize(
    "is_required, word", [(True, "too much: no_such"), (False, "skipped: no_such")]
)
def test_what_is_not_installed_is_skipped_with_a_sentence(is_required, word):
    """But not in CI."""
    args = argparse.Namespace(required=is_required)
    (line,) = guards.checked("no_such", lambda: iter(["ok"]), args)
    assert line.startswith(word)
    assert [*guards.checked("json", lambda: iter(["ok"]), args)] == ["ok"]


def test_exchanges_come_before_all_loops_and_after_them():
    """As in `xxLLxx`; loops between exchanges wait for the slowest device each time."""
    program = """
ENTRY %main {
  %a = f32[8] all-to-all(%x), metadata={}
  %b = (s32[]) while(%y), metadata={op_name="jit(update)/stack0/while"}
  %c = f32[8] all-to-all-done(%b)
}
"""
    assert guards.order_of(program) == "xLx"

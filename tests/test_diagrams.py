"""The diagrams of the manual are what the package's own plans give today."""

import pytest
from helpers import ROOT, run_script


DIAGRAMS = ROOT / "docs" / "diagrams"


@pytest.mark.more
def test_drawn_again_they_are_the_same(tmp_path):
    run_script(DIAGRAMS / "draw.py", "--out", tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in DIAGRAMS.glob("*.svg")}


def test_every_diagram_is_in_the_manual():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for path in DIAGRAMS.glob("*.svg"):
        assert f"(diagrams/{path.name})" in pages

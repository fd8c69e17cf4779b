"""The README's Python blocks run, top to bottom, in one namespace."""

import re

import pytest
from helpers import ROOT


pytestmark = pytest.mark.usefixtures("fast_compilation")
README = (ROOT / "README.md").read_text()


def test_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 5
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_both_commands_stand_in_it():
    assert "pip install -e '.[examples]' && python examples/train_lm.py\n" in README
    assert "pip install -e '.[test]' && pytest\n" in README

"""Fused kernels of real models, at their own sizes, cut by one argument each."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT, script_environment


#: Matrices of the leaves, from each model's configuration: heads x features x head_dim,
#: and what stays whole.
EXPECTED = {
    "gpt2": ["24 x 768 x 64 + 1 x 768 x 768"],
    "llama-huggingface": ["32 x 2048 x 64", "8 x 2048 x 64", "1 x 2048 x 512"],
    "llama-equinox": ["32 x 2048 x 64", "8 x 2048 x 64"],
    "llama-levanter": ["512 x 2048 x 64"],  # 16 layers of 32
    "bloom": ["32 x 1024 x 64 + 1 x 1024 x 1024"],
    "qwen3-next": ["96 x 2048 x 128"],  # 16 queries, 16 keys, 32 values, 32 gates
    "gated-mlp": ["2 x 3072 x 8192", "1 x 8192 x 3072"],
}


def test_each_is_cut_by_one_command():
    script = ROOT / "examples/adopt/matrices.py"
    run = subprocess.run(
        [sys.executable, script],
        env=script_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    # A model's block is a line about it, a table, and below that totals.
    blocks = re.split(r"^(?=[\w-]+: )", run.stdout, flags=re.MULTILINE)
    tables = dict(block.split(":", 1) for block in blocks if block)
    assert tables.keys() == EXPECTED.keys()
    for name, matrices in EXPECTED.items():
        rows = tables[name].split("\n\n")[0].splitlines()[2:]
        assert len(rows) >= len(matrices)
        for each in matrices:
            assert sum(f"  {each} " in row for row in rows) == 1, (name, each)
        assert all(" muon " in row for row in rows)


@pytest.mark.more
def test_an_unknown_model_is_refused():
    script = ROOT / "examples/adopt/matrices.py"
    run = subprocess.run(
        [sys.executable, script, "gpt5"],
        env=script_environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and "invalid choice" in run.stderr

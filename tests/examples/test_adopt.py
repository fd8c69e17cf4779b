"""The adoption examples: plain AdamW, MuonClip after each diff, kernels cut in one."""

import re
import runpy
import shutil
import subprocess
import sys

import jax
import optax
import pytest
from helpers import EXAMPLES, few, run_script

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

ADOPT = EXAMPLES / "adopt"
NAMES = [diff.stem for diff in sorted(ADOPT.glob("*.diff"))]
LOW = 1e-3


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A copy of the folder with all diffs applied, as its README says."""
    folder = tmp_path_factory.mktemp("adopt") / "adopt"
    shutil.copytree(ADOPT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in sorted(folder.glob("*.diff")):
        command = ["git", "apply", diff.name]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def changed(name):
    """The lines that a diff removes and adds."""
    lines = (ADOPT / f"{name}.diff").read_text().splitlines()[2:]
    return tuple(sum(line.startswith(sign) for line in lines) for sign in "-+")


def losses(folder, name, monkeypatch, capsys, steps):
    """The first loss and the last, of a script run as `python <name>.py`."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(
        sys, "argv", [f"{name}.py", f"--steps={steps}", "--batch-size=4"]
    )
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    first, last = re.search(r"loss (\S+) -> (\S+)", capsys.readouterr().out).groups()
    return float(first), float(last)


def test_all_four_are_there():
    scripts = {script.stem for script in ADOPT.glob("*.py")} - {"text", "matrices"}
    assert scripts == set(NAMES) and len(NAMES) == 4


def test_the_table_counts_the_lines():
    rows = re.findall(
        r"^\| `(\w+)\.py` \| (\d+) \| (\d+) \|",
        (ADOPT / "README.md").read_text(),
        re.MULTILINE,
    )
    table = {name: (int(removed), int(added)) for name, removed, added in rows}
    assert table == {name: changed(name) for name in NAMES}


@pytest.mark.more
@pytest.mark.parametrize("name", few(NAMES, "minigpt"))
def test_before(name, monkeypatch, capsys):
    first, last = losses(ADOPT, name, monkeypatch, capsys, steps=2)
    assert 4 < first < 7 and 4 < last < 7  # log(256) is 5.5


@pytest.mark.more
@pytest.mark.parametrize("name", few(NAMES, "minigpt"))
def test_after(name, patched, monkeypatch, capsys):
    """Under a threshold that every head exceeds; the first step clips them all."""
    seen = []
    muonclip = mc.muonclip

    def low_muonclip(*arguments, **options):
        tx = muonclip(*arguments, **options, threshold=LOW)

        def update(grads, state, params, **extra):
            updates, state = tx.update(grads, state, params, **extra)
            clipped = optax.tree.get(state, "num_clipped")
            jax.debug.callback(seen.append, clipped)
            return updates, state

        return optax.GradientTransformationExtraArgs(tx.init, update)

    monkeypatch.setattr(mc, "muonclip", low_muonclip)
    first, last = losses(patched, name, monkeypatch, capsys, steps=12)
    assert last < first
    assert seen[0] == 8  # two layers of four heads


#: Matrices of the leaves, from each model's configuration: heads x features x head_dim,
#: and what stays whole.
MATRICES = {
    "gpt2": ["24 x 768 x 64 + 1 x 768 x 768"],
    "llama-huggingface": ["32 x 2048 x 64", "8 x 2048 x 64", "1 x 2048 x 512"],
    "llama-equinox": ["32 x 2048 x 64", "8 x 2048 x 64"],
    "llama-levanter": ["512 x 2048 x 64"],  # 16 layers of 32
    "bloom": ["32 x 1024 x 64 + 1 x 1024 x 1024"],
    "qwen3-next": ["96 x 2048 x 128"],  # 16 queries, 16 keys, 32 values, 32 gates
    "gated-mlp": ["2 x 3072 x 8192", "1 x 8192 x 3072"],
}


def test_fused_kernels_of_real_models_are_each_cut_by_one_command():
    run = run_script(ADOPT / "matrices.py")
    # A model's block is a line about it, a table, and below that totals.
    blocks = re.split(r"^(?=[\w-]+: )", run.stdout, flags=re.MULTILINE)
    tables = dict(block.split(":", 1) for block in blocks if block)
    assert tables.keys() == MATRICES.keys()
    for name, matrices in MATRICES.items():
        rows = tables[name].split("\n\n")[0].splitlines()[2:]
        assert len(rows) >= len(matrices)
        for each in matrices:
            assert sum(f"  {each} " in row for row in rows) == 1, (name, each)
        assert all(" muon " in row for row in rows)


@pytest.mark.more
def test_matrices_of_an_unknown_model_are_refused():
    run = run_script(ADOPT / "matrices.py", "gpt5", check=False)
    assert run.returncode == 2 and "invalid choice" in run.stderr

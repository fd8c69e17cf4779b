"""The tutorial: all its cells in a short run, and the outputs that are committed."""

import copy
import json

import nbformat
import numpy as np
import pytest
from corpus import Corpus
from helpers import EXAMPLES, script_environment
from nbclient import NotebookClient
from spectra import image

import muonclip_jax as mc


pytestmark = pytest.mark.more  # the notebook runs for 20 seconds
NOTEBOOK = EXAMPLES / "muonclip_tutorial.ipynb"
THRESHOLD = 8.0
SHORT = f"""
STEPS, THRESHOLD, LAYERS, WIDTH = 30, {THRESHOLD}, 1, 64
ADAMW_RATES, MUON_RATES = (6e-3,), (8e-2,)
"""
REPORT = """
import json
print(json.dumps({
    "validation_losses": {k: best(runs).validation_loss for k, runs in results.items()},
    "max_logits": {k: best(runs).max_logits.tolist() for k, runs in results.items()},
    "singular_values": {k: v.tolist() for k, v in orthogonalized.items()},
}))
"""


@pytest.fixture(scope="module")
def committed():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(committed, tmp_path_factory):
    """The notebook after a short run, in a folder without the examples."""
    notebook = copy.deepcopy(committed)
    parameters = next(
        i
        for i, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    )
    notebook.cells.insert(parameters + 1, nbformat.v4.new_code_cell(SHORT))
    notebook.cells.append(nbformat.v4.new_code_cell(REPORT))
    folder = {"metadata": {"path": str(tmp_path_factory.mktemp("tutorial"))}}
    client = NotebookClient(notebook, timeout=300, resources=folder)
    return client.execute(env=script_environment())


@pytest.fixture(scope="module")
def report(executed):
    return json.loads(executed.cells[-1].outputs[0].text)


def printed(notebook):
    return "".join(output.get("text", "") for output in outputs(notebook))


def outputs(notebook):
    return [output for cell in code(notebook) for output in cell.outputs]


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_optimizer_learns_more_than_the_frequency_of_bytes(report):
    counts = np.bincount(Corpus().train, minlength=256)
    frequency = counts[counts > 0] / counts.sum()
    entropy = -np.sum(frequency * np.log(frequency))
    assert set(report["validation_losses"]) == {"AdamW", "Muon", "MuonClip"}
    assert all(loss < entropy for loss in report["validation_losses"].values())


@pytest.mark.parametrize("preset", ["keller", "polar_express", "deepseek_v4"])
def test_singular_values_stay_within_certified_bounds(report, preset):
    values = np.array(report["singular_values"][preset])
    assert len(values) == 1 + len(mc.NS_COEFFS[preset])
    np.testing.assert_allclose(np.sum(values[0] ** 2), 1, rtol=1e-4)  # the norm
    ends = np.geomspace(values[0].min(), values[0].max(), 10_000)
    for step, after in enumerate(values):
        low, high = image((ends[:-1], ends[1:]), mc.NS_COEFFS[preset][:step])
        assert low.min() - 1e-3 < after.min() and after.max() < high.max() + 1e-3


def test_the_clip_holds_the_logits_that_grow_without_it(report):
    heads = {name: np.array(rows) for name, rows in report["max_logits"].items()}
    assert heads["MuonClip"].shape == (30, 1, 4)
    assert heads["MuonClip"].max() < 1.6 * THRESHOLD < heads["Muon"].max()


def test_both_runs_are_one_until_a_logit_exceeds_the_threshold(report):
    muon, muonclip = (
        np.array(report["max_logits"][name]).max(axis=(1, 2))
        for name in ("Muon", "MuonClip")
    )
    first = np.argmax(muon > THRESHOLD)
    assert first > 0
    np.testing.assert_allclose(muonclip[: first + 1], muon[: first + 1], rtol=1e-4)
    assert (muonclip[first + 1 :] < muon[first + 1 :]).mean() > 0.9


def test_describe_sends_the_six_matrices_of_a_block_to_muon(executed):
    rows = [line.split() for line in printed(executed).splitlines() if "kernel" in line]
    matrices = {row[0] for row in rows if "muon" in row}
    attention = {f"attention/{name}" for name in ("query", "key", "value", "out")}
    assert matrices == {f"blocks/0/{m}/kernel" for m in attention | {"up", "down"}}


def test_committed_outputs_are_of_one_run_from_top_to_bottom(committed):
    cells = code(committed)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    assert cells[0].outputs == []  # the package was there, nothing was installed
    data = [output.get("data", {}) for output in outputs(committed)]
    pictures = [kinds for kinds in data if "image/png" in kinds]
    assert len(pictures) == 3
    assert NOTEBOOK.stat().st_size < 1_500_000


@pytest.mark.parametrize("which", ["committed", "executed"])
def test_outputs_hold_no_warnings_and_no_paths_of_a_machine(which, request):
    notebook = request.getfixturevalue(which)
    for output in outputs(notebook):
        assert output.output_type in ("stream", "display_data")
        assert output.get("name", "stdout") == "stdout"
    paths = ("/home/", "/root/", "/tmp/", "/usr/", "site-packages")
    assert not [path for path in paths if path in printed(notebook)]
    assert "warning" not in printed(notebook).lower()


def test_the_badge_opens_this_notebook(committed):
    repository = "https://colab.research.google.com/github/muonclip-jax/muonclip_jax"
    link = f"({repository}/blob/main/examples/{NOTEBOOK.name})"
    assert link in committed.cells[0].source

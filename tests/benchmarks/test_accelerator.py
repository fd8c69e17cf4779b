"""First contact with an accelerator, in small and without one: not its times."""

import json
import pathlib

import accelerator
import pytest
from first_contact import rows, training
from first_contact.rows import Compared
from helpers import run_script
from tables import Table


SCRIPT = pathlib.Path(accelerator.__file__)
ROOT = SCRIPT.parents[1]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    file = tmp_path_factory.mktemp("runs") / "new" / "accelerator.json"
    ran = run_script(SCRIPT, "--tiny", "--json", file)
    written = json.loads(file.read_text())
    return ran.stdout, written, {t["title"]: t["rows"] for t in written["tables"]}


@pytest.mark.more
def test_every_check_passes(result):
    printed, _, tables = result
    outcomes = {name: outcome for name, outcome, *_ in tables["Right"]}
    assert "0 checks failed" in printed and rows.FAILED not in printed
    for start in ("torch's", "newton_schulz", "sharded", "max_logits", "blockwise"):
        found = [v for name, v in outcomes.items() if name.startswith(start)]
        assert found and set(found) == {"ok"}
    assert outcomes["dtype of the iteration"] == "ok: float32"


def test_the_pages_have_the_figures_of_the_run():
    run = json.loads((accelerator.RESULTS / "accelerator_h100.json").read_text())
    found = {table["title"]: table["rows"] for table in run["tables"]}
    formats = {"Fast": rows.FAST, "Trained": training.TRAINED}
    lines = {
        Table(columns).line(row) for t, columns in formats.items() for row in found[t]
    }
    page = (ROOT / "docs/accelerators.md").read_text()
    measured = page.split("## One NVIDIA H100")[1].split("## ")[0].splitlines()
    heads = ("time", "step", "--- ")
    shown = [x for x in measured if x[:2] == "| " and x[2:6] not in heads]
    assert len(shown) == 13 and set(shown) <= lines
    outcomes = [outcome for _, outcome, *_ in found["Right"]]
    assert f"All {sum(x[:2] == 'ok' for x in outcomes)} checks" in page
    assert rows.FAILED not in str(outcomes)
    fast = {row[0]: row for row in found["Fast"]}
    start = "GPT-2's 72 matrices, separate against"
    _, ours, optax, *_ = fast[f"{start} optax"]
    _, _, torch, *_ = fast[f"{start} torch.optim.Muon 2.11.0+cu130"]
    peers = {"optax.contrib.muon": optax, "torch.optim.Muon": torch}
    figures = [f"`{name}` {time:.1f}" for name, time in peers.items()]
    assert ", ".join([f"{ours:.1f} ms", *figures]) in (ROOT / "README.md").read_text()
    speed = (ROOT / "docs/speed.md").read_text().replace("\n", " ")
    assert f"takes {ours:.1f} ms, that of optax's main branch {optax:.1f} ms" in speed


def raises(*_):
    raise ValueError("first | line\nsecond")


def run(monkeypatch, tmp_path, checks, parts=None):
    monkeypatch.setattr(accelerator, "checks", lambda tiny: checks)
    monkeypatch.setattr(accelerator, "parts", lambda tiny: parts or {})
    monkeypatch.setattr(accelerator, "train", lambda tiny: list)
    file = tmp_path / "accelerator.json"
    status = accelerator.main(["--json", str(file)])
    return status, [t["rows"] for t in json.loads(file.read_text())["tables"]]


def test_a_check_that_raises_fails_and_the_others_go_on(monkeypatch, tmp_path):
    checks = {"breaks": raises, "goes on": lambda: Compared(1.0, 2.0)}
    status, (right, *_) = run(monkeypatch, tmp_path, checks)
    assert status == 1
    assert right[0] == ["breaks", "FAILED: ValueError: first / line", None, None]
    assert right[1] == ["goes on", "ok", 1.0, 2.0]


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Compared(1.0, 1.0), 0),
        (Compared(1.1, 1.0), 1),
        (Compared(float("nan"), 1.0), 1),
        ("one device", 0),
    ],
)
def test_an_error_beyond_its_bound_fails(monkeypatch, tmp_path, found, status):
    assert run(monkeypatch, tmp_path, {"check": lambda: found})[0] == status

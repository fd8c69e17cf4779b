"""Scripts for an accelerator, run in small and without one: not their times."""

import json
import lzma
import pathlib
from types import SimpleNamespace

import accelerator
import gpt2
import numpy as np
import pytest
import questions_for_a_card as questions
import trained_on_a_card as on_a_card
from evidence.texts import Text
from first_contact import kernels, rows, training
from first_contact.kernels import Event
from first_contact.rows import Compared
from helpers import assert_close, of_newton_schulz, run_script
from tables import Table


@pytest.mark.more
def test_every_question_has_its_rows(tmp_path):
    file = tmp_path / "questions.json"
    ran = run_script(pathlib.Path(questions.__file__), "--tiny", "--json", file)
    assert rows.FAILED not in ran.stdout
    tables = json.loads(file.read_text())["tables"]
    turns, steps, *of_kernels = (table["rows"] for table in tables)
    assert [row[0].split("'")[0] for row in turns] == ["GPT-2", "Llama-1B"]
    assert all(time > 0 for row in turns for time in row[1:4])
    names = ["mc.muonclip", questions.WITHOUT_GRAPHS, "per_head=False"]
    assert [row[0] for row in steps] == names
    # A GPU's flag changes nothing here; two steps by matrices of heads do.
    losses = [row[1] for row in steps]
    assert losses[0] == losses[1] != losses[2]
    assert len(of_kernels) == 2
    for (_, _, whole, _), (_, _, busy, _), of_all, *each in of_kernels:
        name, calls, ms, in_update = of_all
        assert name == kernels.ALL and 0 < in_update < ms
        assert 0 < busy <= min(whole, ms) * (1 + 1e-9)
        assert sum(row[1] for row in each) == calls
        assert sum(row[2] for row in each) == pytest.approx(ms)
        assert sum(row[3] for row in each) == pytest.approx(in_update)


@pytest.mark.more
def test_tall_matrices_turned_have_the_same_update():
    shapes = gpt2.separate(1, {"up": (16, 48), "down": (48, 16), "out": (16, 16)})
    sides = questions.turned(shapes, lambda x: gpt2.optimizers(x)["ours"])
    (as_they_are, _), (turned, _) = (sides[turns]() for turns in (False, True))
    assert_close(turned, as_they_are, of_newton_schulz(size=48))


def event(name, start, duration, instruction=None):
    stats = [("hlo_op", instruction)] if instruction else []
    times = dict(start_ns=start, duration_ns=duration)
    return SimpleNamespace(name=name, stats=stats, **times)


def plane(name, **lines):
    of_lines = [SimpleNamespace(name=x, events=found) for x, found in lines.items()]
    return SimpleNamespace(name=name, lines=of_lines)


def test_kernels_of_a_gpu_are_those_of_its_streams():
    first, second = event("gemm_7", 0, 4e6, "dot.1"), event("gemm_8", 3e6, 4e6)
    copy = event("MemcpyD2D", 9e6, 1e6, "copy.2")
    gpu = {"Stream #1(Compute)": [first, copy], "Stream #2(Compute)": [second]}
    gpu["XLA Ops"] = [event("dot.1", 0, 4e6, "dot.1")]
    host = plane("/host:CPU", python=[event("dot.1", 0, 9e6, "dot.1")])
    profile = SimpleNamespace(planes=[host, plane("/device:GPU:0", **gpu)])
    found = kernels.events_of(profile)
    program = (
        f'  %dot.1 = f32[] dot(), metadata={{op_name="jit(a)/{kernels.UPDATE}/b"}}'
    )
    whole, busy, *named = kernels.rows(found, kernels.updating(program))
    assert (whole.ms, busy.ms) == (10, 8)
    of_all = (kernels.ALL, 3, 9, 4)
    assert named == [of_all, ("gemm", 2, 8, 4), ("MemcpyD2D", 1, 1, 0)]


def test_on_a_cpu_loops_are_not_counted_beside_their_bodies():
    line = [event("while.3", 0, 9, "while.3"), event("add.1", 1, 2, "add.1")]
    profile = SimpleNamespace(planes=[plane("/host:CPU", a=[*line, event("x", 0, 1)])])
    assert kernels.events_of(profile) == [Event("add.1", 1, 2, "add.1")]


def curve(*losses, **about):
    names = ["AdamW, 1", "AdamW, 2", "AdamW, 4", "mc.muonclip, 4"]
    first = {"steps": 100, "bytes a parameter": 20, "limit": "the text", "runs": names}
    steps = [25, 50, 75, 100]
    lines = [dict(step=x, losses=y) for x, y in zip(steps, losses, strict=False)]
    return on_a_card.outcome([first | about, *lines])


def test_the_share_is_where_the_curves_cross_and_said_to_be_a_bound():
    losses = [[4, 4, 4, 4], [3, 3, 3, 3], [2.5, 2.5, 2.5, 2], [2.2, 2, 2.1, 1.5]]
    said = curve(*losses)
    assert "mc.muonclip, 4 needs at most 75% of the tokens of AdamW, 2" in said
    assert "upper bound" in said and "one seed" in said and "the text" in said
    assert "edge" not in said and "ended" not in said
    assert "ended at 75%" in curve(*losses[:3])
    last = [2, 2.2, 2.1, 1.5]
    assert "edge" in curve(*losses[:3], last)
    late = [
        [4, 4, 4, 4],
        [3, 3, 3, 3.5],
        [2.5, 2.5, 2.5, 3],
        [2.2, 2, float("nan"), 2.1],
    ]
    assert "mc.muonclip, 4 does not reach the last loss of AdamW, 2" in curve(*late)


def test_each_file_is_gathered_once(tmp_path, monkeypatch):
    contents = {"a.py": "one\n", "b.py": "two\n", "c.txt": "three\n", "d/e.py": "one\n"}
    contents["long.py"] = "x" * (on_a_card.LARGEST + 1)
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(on_a_card.site, "getsitepackages", lambda: [str(tmp_path)])
    found = on_a_card.gathered(100)
    assert sorted(found.split()) == [b"one", b"two"]
    packed = tmp_path / "text.xz"
    on_a_card.main(["--gather", str(packed)])
    assert lzma.decompress(packed.read_bytes()) == found
    assert on_a_card.gathered(5) == found[:5]
    (tmp_path / "text").write_bytes(found)
    assert Text(str(packed)).digest == Text(str(tmp_path / "text")).digest


@pytest.mark.more
def test_all_four_runs_learn_more_than_the_frequencies_of_bytes(tmp_path):
    file = tmp_path / "new" / "curves.jsonl"
    script = pathlib.Path(on_a_card.__file__)
    ran = run_script(script, "--tiny", "--minutes", 30, "--out", file)
    about, *found = (json.loads(line) for line in file.read_text().splitlines())
    size = on_a_card.TINY
    assert about["limit"] == "20 bytes a parameter" and len(about["runs"]) == 4
    assert 19 < about["bytes a parameter"] <= 20
    calls = about["steps"] // size.together
    assert len(found) == min(calls, on_a_card.EVALUATIONS)
    assert found[-1]["step"] == about["steps"]
    share = np.bincount(Text("code").train, minlength=256) / len(Text("code").train)
    entropy = -np.sum(share * np.log(np.maximum(share, 1e-30)))
    assert max(found[-1]["losses"]) < entropy < min(found[0]["losses"])
    assert all(line["largest logit"] > 0 for line in found)
    assert "one seed" in ran.stdout.splitlines()[-1]


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

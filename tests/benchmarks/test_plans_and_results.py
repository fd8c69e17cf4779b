"""Which runs there are, on which text, and how their results are kept."""

import dataclasses
import hashlib
import json
import math
import pathlib

import numpy as np
import pytest
from evidence.lab import Lab, Unfinished
from evidence.optimizers import hyperparameters, schedule
from evidence.run import Run
from evidence.texts import HELD_OUT, Text, text


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted((BENCHMARKS / "evidence" / "results").glob("*.jsonl"))


def test_schedules():
    for name in ("cosine", "constant", "linear"):
        factors = schedule(Run(steps=200, schedule=name))
        np.testing.assert_allclose(factors[:10], np.arange(1, 11) / 10)
        assert factors.shape == (200,) and factors.min() > 0 and factors.max() == 1
    assert (schedule(Run(steps=200, schedule="constant"))[10:] == 1).all()
    linear = schedule(Run(steps=200, schedule="linear"))
    np.testing.assert_allclose(np.diff(linear[10:]), -1 / 191)
    cosine = schedule(Run(steps=200))
    assert (np.diff(cosine[10:]) < 0).all()
    assert cosine[105] == pytest.approx(0.5, abs=0.01)
    at = hyperparameters(Run(steps=200, learning_rate=0.5, adam_learning_rate=0.1))
    rates = np.float32([0.5, 0.1, 0.1])
    assert at[9] == (*rates, math.inf, None)


def test_parts_of_a_text_do_not_overlap(tmp_path):
    file = tmp_path / "text.txt"
    content = np.random.default_rng(0).integers(0, 256, 300_000).astype(np.uint8)
    file.write_bytes(content.tobytes())
    source = Text(str(file), **HELD_OUT)
    tune, report = source.parts["tune"], source.parts["report"]
    assert len(tune) > 15_000 < len(report)
    whole = np.concatenate([source.train, tune, report])
    assert len(whole) == len(content)
    np.testing.assert_array_equal(np.bincount(whole), np.bincount(content))
    for part, other in [(tune, report), (report, source.train), (source.train, tune)]:
        assert part[:64].tobytes() in content.tobytes()
        assert part[:64].tobytes() not in other.tobytes()
    again = source.batch(4, 16, seed=3, step=5)
    np.testing.assert_array_equal(source.batch(4, 16, seed=3, step=5), again)
    assert (source.batch(4, 16, 4, 5) != again).any()


def test_batches_are_those_of_the_kept_results(tmp_path):
    """Results are kept by run and text: other batches would go unnoticed."""
    file = tmp_path / "text.txt"
    file.write_bytes(b"".join(i.to_bytes(4) for i in range(100_000)))
    source = Text(str(file), **HELD_OUT)
    seen = [source.batch(4, 16, seed, 5) for seed in (0, 1)]
    seen += [source.held_out(part, 4, 16) for part in HELD_OUT]
    assert all(x.shape == (4, 17) and x.dtype == np.int32 for x in seen)
    digests = [hashlib.sha256(x.tobytes()).hexdigest()[:8] for x in seen]
    assert digests == ["d7d31002", "c89b9f39", "ea5cd185", "f95bff4a"]


@pytest.mark.parametrize(("corpus", "most"), [("code", 900), ("prose", 500)])
def test_kept_results_are_of_the_present_texts(corpus, most):
    """Whichever Python and machine runs this: else the report has no runs there."""
    lines = [json.loads(line) for file in RESULTS for line in file.open()]
    runs = {line["run"]: line for line in lines if line["run"].startswith("{")}
    of = [
        k
        for k in runs
        if json.loads(k).get("corpus", "code") == corpus
        and not json.loads(k).get("task")
    ]
    assert len(of) > most
    assert all(text(corpus).was_read(runs[key]["text"]) for key in of)


def test_a_text_that_was_changed_was_not_read(tmp_path):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, letter in zip(files, "ab", strict=True):
        file.write_text(1000 * letter)
    one, other = (text(str(file)) for file in files)
    assert one.was_read(one.digest) and not one.was_read(other.digest)


def test_every_field_is_part_of_the_key():
    assert json.loads(Run().key) == {}
    assert json.loads(Run(seed=2, fused=True).key) == {"seed": 2, "fused": True}
    others = {
        bool: lambda x: not x,
        str: lambda x: x + "!",
        tuple: lambda x: (("a", 1),),
    }
    keys = set()
    for field in dataclasses.fields(Run):
        default = field.default
        change = others.get(type(default), lambda x: 3 if x is None else x / 2 + 7)
        changed = 9.0 if field.name == "threshold" else change(default)
        keys.add(Run(**{field.name: changed}).key)
    assert len(keys | {Run().key}) == 1 + len(dataclasses.fields(Run))


def test_one_program_serves_all_rates_and_corpora():
    run = Run().but(learning_rate=0.3, weight_decay=1.0, seed=7, corpus="prose")
    assert run.program == run.but(warm_up=0.0).program == Run().program
    rising = [run.but(beta=0.95, beta_from=at).program for at in (0.5, 0.85)]
    assert rising[0] == rising[1] != run.program
    assert run.but(threshold=30.0).program == run.but(threshold=10.0).program
    assert run.but(threshold=30.0).program != run.program
    assert run.but(muon=(("nesterov", False),)).program != run.program


def test_lab_keeps_results_over_interruptions(tmp_path):
    lab = Lab(tmp_path, environment="here")
    lab.open("first")
    assert lab.once("a", lambda: {"value": 1})["value"] == 1
    with (tmp_path / "first.jsonl").open("a") as file:
        file.write('{"run": "b", "val')  # cut off
    lab = Lab(tmp_path, environment="there")
    lab.open("first")
    assert lab.once("a", lambda: pytest.fail("measured again"))["value"] == 1
    assert lab.once("c", lambda: {"value": 3})["value"] == 3
    lab = Lab(tmp_path, trains=False)
    assert [lab.once(name, dict)["value"] for name in "ac"] == [1, 3]
    assert lab.environments() == ["here", "there"]
    other = Lab(tmp_path / "other", known=tmp_path / "first.jsonl")
    assert other.once("a", lambda: pytest.fail("measured again"))["value"] == 1
    with pytest.raises(Unfinished, match="1 runs are missing"):
        lab.results([Run()])

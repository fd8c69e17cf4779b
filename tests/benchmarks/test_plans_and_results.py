"""Which runs there are, how their results are kept, and what is computed of them."""

import dataclasses
import hashlib
import json
import math
import pathlib

import long_run
import numpy as np
import pytest
from evidence import intervals, tokens
from evidence.experiments import token_conditions, width_transfer
from evidence.lab import Lab, losses, Unfinished
from evidence.optimizers import hyperparameters, schedule
from evidence.plan import Plan
from evidence.run import Run
from evidence.spikes import spikes, stress_spikes, stress_steps
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


def test_spikes_by_the_stated_rule():
    generator = np.random.default_rng(0)
    losses = 2.0 + 0.1 * generator.standard_normal(400)
    losses[[120, 121, 300]] = 3.5, 3.4, 2.9
    losses[10] = 9.0  # too early to have fifty steps before it
    assert spikes(losses) == [120, 300]
    losses[200] = math.nan
    assert spikes(losses) == [120, 200, 300]


def test_stress_spikes_are_those_of_a_run_and_not_of_its_batch():
    generator = np.random.default_rng(0)
    batch = 0.13 * generator.standard_normal(600)  # more than the bound, for all runs
    own = 0.01 * generator.standard_normal((5, 600))
    losses = 3.0 - 0.001 * np.arange(600) + batch + own
    losses[:, 250] += 2.0  # a hard batch
    losses[1, 300:303] += 0.5  # three steps, all counted
    losses[2, [50, 570]] += 0.5  # without a whole window around them
    assert stress_spikes(losses.tolist()).tolist() == [0, 3, 0, 0, 0]
    assert stress_steps(600) == 400
    # A run that stopped, or whose loss is none, spikes in every step from there on.
    short = [row[: 450 if i == 3 else None] for i, row in enumerate(losses.tolist())]
    short[4][400:] = [math.nan] * 200
    assert stress_spikes(short).tolist() == [0, 3, 0, 50, 100]


def test_interval_against_the_table_of_student():
    # t(0.975, 2) = 4.3027
    of = intervals.interval([1.0, 2.0, 3.0])
    assert of.mean == 2.0
    assert of.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    pair = intervals.paired([1.0, 2.5, 3.0], [0.0, 1.0, 2.5])
    assert pair.mean == pytest.approx(1.0)
    assert pair.half == pytest.approx(4.3027 * 0.5 / 3**0.5, rel=1e-4)


def test_intervals_cover_as_often_as_they_say():
    generator = np.random.default_rng(0)
    found = [intervals.interval(x) for x in generator.standard_normal((4000, 5))]
    inside = np.mean([of.low < 0 < of.high for of in found])
    assert inside == pytest.approx(0.95, abs=0.015)


def test_a_run_that_diverged_is_the_worst():
    results = [{"curve": [[10, math.nan, math.nan]]}]
    results += [{"curve": [[5, 3.0, 4.0], [10, 1.0, 2.0]]}]
    assert losses(results) == [math.inf, 2.0]
    assert losses(results, part="tune") == [math.inf, 1.0]


@pytest.mark.parametrize(
    ("goal", "shown"),
    [
        (2.0, "at most 52% ± 23%"),  # one of two had it in its shortest run
        (1.75, "59% ± 0%"),
        (1.0, "over 100% in 1 of 2 seeds"),
    ],
)
def test_a_share_that_no_run_was_short_or_long_enough_for_is_a_bound(goal, shown):
    paths = [[(0.5, 2.0), (1.0, 1.0)], [(0.5, 2.0), (1.0, 1.0)]]
    if goal == 2.0:
        paths[0] = [(0.5, 2.1), (1.0, 1.1)]
    if goal == 1.0:
        paths[0][-1] = (1.0, 1.2)
    outcome = tokens.Outcome(None, [goal, goal], paths)
    assert outcome.show_share() == shown


def test_share_of_the_tokens_is_interpolated_in_the_logarithm():
    path = [(0.25, 3.0), (0.5, 2.0), (1.0, 1.0)]
    assert tokens.reached(path, 1.5) == pytest.approx(0.5 * 2**0.5)
    assert tokens.reached(path, 2.0) == pytest.approx(0.5)
    assert math.isnan(tokens.reached(path, 0.5))


def test_best_octave_is_the_vertex_of_the_parabola():
    x = np.arange(5.0)
    assert width_transfer.best_octave((x - 2.3) ** 2 + 1) == pytest.approx(2.3)
    assert math.isnan(width_transfer.best_octave(x))


class Known:
    """A lab that has trained everything: the loss is a function of the run."""

    def __init__(self, loss):
        self.loss = loss

    def results(self, runs, kept_in=""):
        return [{"curve": [[r.steps, self.loss(r), self.loss(r)]]} for r in runs]

    def gather(self, runs):
        return {key: self.results(of_key) for key, of_key in runs.items()}


def test_shares_of_the_tokens_by_condition():
    # Muon's loss falls with the logarithm of its steps, and more so with its batch.
    def loss(run):
        off = abs(math.log(run.learning_rate / 1.6e-2))
        off -= 0.1 * (run.matrices == "per_head")
        if run.optimizer == "adamw":
            return 3.0 - math.log(run.steps) + off
        return 3.0 - math.log(run.steps * (1 + run.batch / 64)) + off

    outcomes = token_conditions.measure_all(Known(loss), Plan(), "code")
    shares = {name: outcome.shares for name, outcome in outcomes.items()}
    others = ("rates tuned for every length", "AdamW's parameters tuned too")
    for name in ("one matrix per head", "and AdamW's"):
        assert len(shares.pop(f"{name}, width 96")) == 3
    assert {len(of_seed) for of_seed in shares.values()} == {token_conditions.SEEDS}
    assert shares["64 sequences"] == pytest.approx([0.5] * 6)
    for name in ("16 sequences, 400 steps", "1,600 steps", *others):
        assert shares[name] == pytest.approx([0.8] * 6)
    assert shares["one matrix per head"] == pytest.approx([0.8 * math.exp(-0.1)] * 6)
    # At a quarter of its rate AdamW loses log 4: Muon's shortest run is better.
    assert shares["AdamW at 1/4 of its rate"] == [0.35] * 6
    assert token_conditions.difference(outcomes).mean == pytest.approx(-0.3)
    assert token_conditions.saves(outcomes["64 sequences"])
    assert not token_conditions.saves(outcomes["4 sequences"])


def records(steps, programs, megabytes, loss=2.0):
    """A log whose every tenth line has memory and programs, as the script writes it."""
    lines = [dict(loss=loss, max_logit=1.0, clipped=0) for _ in range(steps)]
    for line in lines[9::10]:
        line |= dict(programs=programs, megabytes=megabytes)
    return lines


def test_a_run_that_was_killed_once():
    whole = records(1000, programs=7, megabytes=100.0)
    last = records(1000, programs=5, megabytes=120.0)
    # After the checkpoint at 398 the second part compiled until its 60th step, took
    # memory to the end, clipped two steps of two batches, and one loss is 1 % off.
    for line in last[398:450]:
        line |= {"programs": 3} if "programs" in line else {}
    last[-1] |= dict(megabytes=150.0, loss=2.02)
    for i in (900, 901, 904, 905):
        last[i]["clipped"] = 1
    last[50]["max_logit"], last[950]["max_logit"] = 5.0, 2.5
    first = records(420, programs=5, megabytes=100.0)
    row = long_run.measured([first, last], whole)
    names = [name for name in long_run.COLUMNS if name != "run"]
    found = dict(zip(names, row, strict=True))
    assert found["kills"] == 1
    assert found["micro-batches again"] == 420 - 398
    assert found["peak memory, MB"] == 150
    assert found["of it after 300, MB"] == 30
    assert found["compiled after 300"] == 0
    assert found["steps that clip"] == 2
    assert found["largest logit over the threshold"] == 5 / long_run.THRESHOLD
    assert found["after 100 steps"] == 2.5 / long_run.THRESHOLD
    assert found["last loss"] == pytest.approx(2 + 0.02 / 100)
    assert found["off, one step"] == pytest.approx(0.01)
    assert found["off, mean of 50"] == pytest.approx(0.01 / 100)

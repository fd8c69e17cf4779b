"""What the experiments compute from the results of runs."""

import math

import numpy as np
import pytest
from evidence import intervals, tokens
from evidence.experiments import token_conditions, width_transfer
from evidence.lab import losses
from evidence.plan import Plan
from evidence.spikes import spikes, stress_spikes, stress_steps


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

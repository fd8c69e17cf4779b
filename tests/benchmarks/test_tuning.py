"""Walks to the best rates: those of the evidence, and those of the example."""

import argparse
import math

import pytest
import tune_train_lm
from evidence import tuning
from evidence.run import Run
from tune_train_lm import GRIDS, Place


class Bowl:
    """A lab whose losses are known: least at the place given."""

    def __init__(self, *best):
        self.best, self.asked = best, set()

    def results(self, runs, kept_in):
        assert kept_in == "tuning"
        return [self.result(run) for run in runs]

    def result(self, run):
        place = (
            tuning.RATES.index(run.learning_rate),
            tuning.DECAYS.index(run.weight_decay),
            tuning.RATES.index(run.adam_learning_rate),
        )[: len(self.best)]
        self.asked.add(place)
        loss = sum((a - b) ** 2 for a, b in zip(place, self.best, strict=True))
        return {"curve": [[10, loss if run.learning_rate < 0.2 else math.nan, 0.0]]}


def test_tuning_ends_where_both_axes_have_worse_neighbors():
    for best in [(3, 2), (7, 4), (5, 0), (6, 5)]:
        lab = Bowl(*best)
        start = dict(learning_rate=tuning.RATES[6], adam_learning_rate=tuning.RATES[6])
        run = tuning.tuned(lab, Run(**start))
        assert (
            tuning.RATES.index(run.learning_rate),
            tuning.DECAYS.index(run.weight_decay),
        ) == best
        rate, decay = best
        around = {
            (rate - 1, decay),
            (rate + 1, decay),
            (rate, decay - 1),
            (rate, decay + 1),
        }
        assert {(r, d) for r, d in around if 0 <= d < len(tuning.DECAYS)} <= lab.asked


def test_tuning_walks_along_the_axes_it_is_given():
    start = Run(learning_rate=tuning.RATES[6], adam_learning_rate=tuning.RATES[6])
    found = tuning.tuned(Bowl(7, 3, 2), start, (*tuning.AXES, "adam_learning_rate"))
    assert found == start.but(
        learning_rate=tuning.RATES[7],
        weight_decay=tuning.DECAYS[3],
        adam_learning_rate=tuning.RATES[2],
    )
    found = tuning.tuned(Bowl(7, 3, 2), start)
    assert found.adam_learning_rate == tuning.RATES[6]


@pytest.mark.parametrize("best", [(6e-3, 0.5), (1.2e-2, 0.1), (7.5e-4, 2.0)])
def test_rates_of_the_example_are_walked_to(monkeypatch, best):
    seen = []

    def loss(optimizer, flag, place, args):
        assert (optimizer, flag) == ("adamw", "--adam-learning-rate")
        seen.append(place)
        rate, decay = best
        return 2 + math.log(place.rate / rate) ** 2 + (place.decay - decay) ** 2

    monkeypatch.setattr(tune_train_lm, "loss", loss)
    found = tune_train_lm.seen("adamw", GRIDS["adamw"], argparse.Namespace())
    assert list(found) == seen and len(set(seen)) == len(seen)
    assert min(found, key=lambda place: found[place]) == best
    assert set(GRIDS["adamw"].next_to(Place(*best))) <= set(found)

"""The comparison of libraries: what it reads off the curves, and a new library."""

import importlib.util
import sys

import numpy as np
import optax
import pytest
from helpers import ROOT
from libraries import Leaf, optax_muon, optax_muon_of_main, this_package

import muonclip_jax as mc


SCRIPT = ROOT / "benchmarks" / "libraries.py"


@pytest.fixture(scope="module")
def script():
    """The script as a module: by name it is the folder."""
    spec = importlib.util.spec_from_file_location("compare_libraries", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("goal", "steps"), [(2.5, 15.0), (3.0, 10), (9.0, 10), (1.5, 35.0), (0.5, np.nan)]
)
def test_steps_to_a_loss_are_read_off_between_the_points(script, goal, steps):
    curve = [[10, 3.0], [20, 2.0], [30, 2.0], [40, 1.0]]
    np.testing.assert_equal(script.steps_to(curve, goal), steps)


class Copies:
    """An update that holds, at its peak, ten times the bytes of its params."""

    def __init__(self, params, leaves, decay):
        self.params = params
        self.entries = sum(x.size for x in params.values())

    def step(self, gradients, rate):
        return np.full(10 * self.entries, rate, np.float32).sum()

    def state_bytes(self):
        return 8 * self.entries


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the pages")
def test_the_peak_of_an_update_is_what_it_holds_at_once(script, monkeypatch):
    monkeypatch.setattr(script, "REPEATS", 3)
    # 40 bytes a parameter in one array, and 8 of the state; pages are rounded.
    assert script.peak_of_update(Copies)["peak"] == pytest.approx(48, abs=1)


def of_optax(axes):
    return optax.contrib.muon(
        0.1,
        weight_decay=0.1,
        adam_weight_decay=0.1,
        adam_b2=0.95,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=axes,
    )


@pytest.mark.parametrize(
    ("library", "make"),
    [
        (this_package, lambda axes: mc.muon(0.1, dimension_numbers=axes)),
        (optax_muon, of_optax),
        (optax_muon_of_main, of_optax),
    ],
)
def test_a_step_is_that_of_the_library(library, make):
    generator = np.random.default_rng(0)
    shapes = {"w": (8, 4), "bias": (4,)}
    params, *gradients = (
        {k: generator.normal(size=s).astype(np.float32) for k, s in shapes.items()}
        for _ in range(3)
    )
    leaves = {"w": Leaf(True), "bias": Leaf(False)}
    found = library.Optimizer(params, leaves, 0.1)
    tx = make({"w": mc.MuonDimensionNumbers(0, 1), "bias": None})
    state, expected = tx.init(params), params
    for gradient in gradients:
        stepped = found.step(gradient, 0.1)
        updates, state = tx.update(gradient, state, expected)
        expected = optax.apply_updates(expected, updates)
    for name in shapes:
        np.testing.assert_allclose(stepped[name], expected[name], rtol=1e-4, atol=1e-5)
    assert found.state_bytes() >= 4 * (32 + 2 * 4)


def test_the_table_of_the_readme_is_that_of_the_results(script):
    results = script.Results(SCRIPT.with_suffix("") / "results.jsonl")
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert f"\n\n{script.table(results).markdown()}\n\n" in page
    names = {line.get("library") for line in results.lines.values()} - {None}
    assert names == set(script.NAMES)

"""What the benchmarks compute beside times: bounds, arithmetic, errors and tables."""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import matrix_of
from hypothesis import given, settings
from hypothesis import strategies as st

import muonclip_jax as mc


BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
CUBIC = ((1.5, -0.5, 0.0),)  # positive up to the root of 3, at most 1


@pytest.fixture(autouse=True)
def _import_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def compose(x, schedule):
    for a, b, c in schedule:
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("name", sorted(mc.NS_COEFFS))
def test_certified_bounds_enclose_a_dense_sweep_tightly(name):
    from coefficients import certified

    schedule = mc.NS_COEFFS[name]
    ranges = certified(1e-3, 1, schedule)
    assert ranges.start[0] == 1e-3 and ranges.end[-1] == 1
    np.testing.assert_array_equal(ranges.end[:-1], ranges.start[1:])
    for share in np.linspace(0, 1, 11):
        inside = ranges.start + share * (ranges.end - ranges.start)
        values = compose(inside, schedule)
        assert (values >= ranges.low).all() and (values <= ranges.high).all()
    sweep = compose(np.geomspace(1e-3, 1, 200_000), schedule)
    assert sweep.min() - 1e-3 < ranges.low.min() <= sweep.min()
    assert sweep.max() + 1e-3 > ranges.high.max() >= sweep.max()


finite = st.floats(-8, 8, width=32)


@settings(deadline=None)
@given(st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=3), finite)
def test_any_schedule_is_enclosed_on_wide_intervals(schedule, start):
    from certify import image

    ends = np.array([start]), np.array([start + 1.5])
    low, high = image(ends, schedule)
    values = compose(np.linspace(ends[0], ends[1], 999), schedule)
    assert (values >= low).all() and (values <= high).all()


def test_one_step_is_bounded_by_its_extremum():
    from certify import image

    (low,), (high,) = image((np.array([0.5]), np.array([1.2])), CUBIC)
    assert low == pytest.approx(0.6875) and high == pytest.approx(1)


@pytest.mark.parametrize("name, tolerance", [("certified", 1e-4), ("rounded", 2**-6)])
def test_thresholds_of_a_cubic_are_its_roots(name, tolerance):
    """In bfloat16 up to a unit of the input and one of the output, both 2**-7."""
    import coefficients

    ranges = getattr(coefficients, name)
    (kept,) = [x for x in np.roots([0.5, 0, -1.5, 0.7]).real if 0 < x < 1]
    found = coefficients.kept_from(ranges(1e-3, 1, CUBIC), 0.7)
    assert found == pytest.approx(kept, rel=tolerance)
    assert coefficients.kept_from(ranges(1e-3, 1, CUBIC), 1.1) is None
    safe = coefficients.safe_up_to(ranges(1, 4, CUBIC))
    assert safe == pytest.approx(np.sqrt(3), rel=tolerance)
    assert coefficients.safe_up_to(ranges(2, 4, CUBIC)) is None


def test_rounded_takes_every_bfloat16_number():
    from coefficients import rounded

    ranges = rounded(0.5, 1, CUBIC)
    np.testing.assert_array_equal(ranges.start, np.linspace(0.5, 1, 129))
    exact = compose(ranges.start, CUBIC)
    np.testing.assert_array_equal(ranges.low, jnp.asarray(exact, jnp.bfloat16))


def test_needed_flops_are_those_counted_by_hand():
    from optimizer_step import needed_flops

    cube = 2 * 128**3
    square = 5 * 3 * cube  # X X^T, its square, and the product with X, five times
    stack = {"a": (2, 128, 128), "b": (128, 128)}
    assert needed_flops(stack) == pytest.approx(3 * square, rel=0.02)
    # Two passes, each X X^T and Q X. Steps take 4 products of m^3; the first of a pass
    # lacks the one with Q before it, and the last the two for the next X X^T.
    wide = 2 * 2 * (4 * cube) + (3 * 4 - 3 + 2 * 4 - 3) * cube
    assert needed_flops({"c": (512, 128)}) == pytest.approx(wide, rel=0.02)


def test_the_peak_is_that_of_the_fastest_product():
    import optimizer_step

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    costs = optimizer_step.chain.lower(x).compile().cost_analysis()
    per_chain = optimizer_step.CHAIN * 2
    assert costs["flops"] == pytest.approx(per_chain * 256**3, rel=0.01)
    # In GFLOP/s 10, 50 and 40: the one of 2048 is the fastest.
    speeds = {1024: 1e10, 2048: 5e10, 4096: 4e10}
    times = {str(n): [per_chain * n**3 / v] * 3 for n, v in speeds.items()}
    shapes = {"a": (128, 128)}
    times["ours"] = [optimizer_step.needed_flops(shapes) / 2e10] * 3
    assert optimizer_step.share_of_peak(shapes, times) == pytest.approx(0.4)


def test_ratios_are_of_neighbours():
    from alternating import alternate, compare

    times = {"ours": [1.0, 2.0, 10.0], "peer": [2.0, 4.0, 30.0]}
    assert compare(times, "ours", "peer") == (2.0, 4.0, 2.0)
    order = []
    sides = {name: lambda name=name: order.append(name) for name in "ab"}
    assert {k: len(v) for k, v in alternate(sides, 2).items()} == {"a": 2, "b": 2}
    assert "".join(order) == "ab" + "ab" + "ba"


def test_tables_come_back_from_the_file(tmp_path, capsys):
    from tables import Report

    file = tmp_path / "new" / "tables.json"
    report = Report(argparse.Namespace(json=file, repeats=3))
    table = report.table("Times", {"case": "", "seconds": ".2f", "share": ".0%"})
    table.add("first", 1 / 3, 0.5)
    table.add("second", None, 1)
    report.write()
    printed = capsys.readouterr().out
    assert "| first | 0.33 | 50% |\n| second | - | 100% |\n" in printed
    written = json.loads(file.read_text())
    assert written["environment"] == printed.splitlines()[0]
    assert written["arguments"] == {"json": str(file), "repeats": 3}
    (read,) = written["tables"]
    assert read["title"] == "Times" and read["columns"] == ["case", "seconds", "share"]
    assert read["rows"] == [["first", 1 / 3, 0.5], ["second", None, 1]]


def test_errors_of_the_exact_answer_are_those_of_the_polynomial():
    from accuracy import Case

    x = matrix_of(np.geomspace(1, 1e-4, 24), 24, 40).astype(np.float32)
    case = Case(x, "keller")
    exact = case.errors_of(case.exact)
    assert (exact.relative, exact.largest) == (0, 0)
    assert exact.distances == pytest.approx(case.polynomial_distances())
    off = case.errors_of(1.5 * case.exact)
    assert off.relative == pytest.approx(0.5)
    assert off.norm == pytest.approx(1.5 * exact.norm)


def test_polar_factor_has_no_distance_on_the_significant_singular_vectors():
    from accuracy import Case

    x = matrix_of([1, 0.5, 0.1, 5e-3], 6, 9).astype(np.float32)
    case = Case(x, "keller")
    three = case.left[:, :3] @ case.right[:3]
    assert case.errors_of(three).distances == pytest.approx((0, 1))


def test_lower_precision_shows_in_the_errors():
    from accuracy import Case, FORM_NAMES

    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    errors = dict(zip(FORM_NAMES, Case(x, "quintic").errors(), strict=True))
    assert errors["standard float32"].relative < 1e-5
    assert errors["gram float32"].relative < 1e-4
    assert 1e-3 < errors["standard bfloat16"].relative < 0.1


def test_spectra_are_what_they_are_called():
    from spectra import synthetic

    matrices = synthetic()
    singular = {k: np.linalg.svd(x, compute_uv=False) for k, x in matrices.items()}
    assert all(x.shape == (256, 1024) for x in matrices.values())
    assert singular["1 to 1e-4"][-1] == pytest.approx(1e-4, rel=0.01)
    assert singular["power law 1/k"][9] == pytest.approx(0.1, rel=1e-3)
    assert singular["rank 10"][9] > 0.99 and singular["rank 10"][10] < 1e-5


def test_momentum_is_that_of_the_example(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "examples"))
    import sys

    import train_lm
    from evidence.texts import Text
    from flax import nnx
    from spectra import MODEL, momentum

    file = tmp_path / "text"
    file.write_bytes(np.random.default_rng(0).bytes(1 << 15))
    ours = momentum(2, MODEL._replace(layers=1), Text(str(file), validation=15))

    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--layers", "1"])
    args, corpus = train_lm.parse_args(), train_lm.Corpus(file)
    model = train_lm.make_model(args)
    tx = train_lm.make_optimizer("muon", args)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for step in range(2):
        batch = corpus.batch(args.batch_size, args.context, seed=args.seed, step=step)
        train_lm.train_step(model, optimizer, jnp.asarray(batch))
    (state,) = (
        s
        for s in jax.tree.leaves(
            optimizer.opt_state, is_leaf=lambda x: isinstance(x, mc.ScaleByMuonState)
        )
        if isinstance(s, mc.ScaleByMuonState)
    )
    block = nnx.to_pure_dict(state.mu)["blocks"][0]
    theirs = {
        "query": block["attention"]["query"],
        "up": block["up"],
        "down": block["down"],
    }
    assert [name.split()[0] for name in ours] == list(theirs)
    for x, leaf in zip(ours.values(), theirs.values(), strict=True):
        np.testing.assert_allclose(
            x, leaf["kernel"].reshape(x.shape), atol=1e-6 * abs(x).max()
        )


def test_an_overflow_is_no_error_of_the_script():
    from accuracy import Case

    case = Case(np.eye(3, 5, dtype=np.float32), "keller")
    assert np.isnan(case.errors_of(np.full((3, 5), np.inf)).relative)

"""Bounds on what presets make of singular values, and errors by spectrum and form."""

import jax.numpy as jnp
import numpy as np
import pytest
import spectra
from helpers import matrix_of
from hypothesis import given, settings
from hypothesis import strategies as st
from spectra import Case, certified, image, kept_from, rounded, safe_up_to, synthetic

import muonclip_jax as mc


CUBIC = ((1.5, -0.5, 0.0),)  # positive up to the root of 3, at most 1
finite = st.floats(-8, 8, width=32)


def compose(x, schedule):
    for a, b, c in schedule:
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("name", sorted(mc.NS_COEFFS))
def test_certified_bounds_enclose_a_dense_sweep_tightly(name):
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


@settings(deadline=None)
@given(st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=3), finite)
def test_any_schedule_is_enclosed_on_wide_intervals(schedule, start):
    ends = np.array([start]), np.array([start + 1.5])
    low, high = image(ends, schedule)
    values = compose(np.linspace(ends[0], ends[1], 999), schedule)
    assert (values >= low).all() and (values <= high).all()


def test_one_step_is_bounded_by_its_extremum():
    (low,), (high,) = image((np.array([0.5]), np.array([1.2])), CUBIC)
    assert low == pytest.approx(0.6875) and high == pytest.approx(1)


@pytest.mark.parametrize("name, tolerance", [("certified", 1e-4), ("rounded", 2**-6)])
def test_thresholds_of_a_cubic_are_its_roots(name, tolerance):
    """In bfloat16 up to a unit of the input and one of the output, both 2**-7."""
    ranges = getattr(spectra, name)
    (kept,) = [x for x in np.roots([0.5, 0, -1.5, 0.7]).real if 0 < x < 1]
    found = kept_from(ranges(1e-3, 1, CUBIC), 0.7)
    assert found == pytest.approx(kept, rel=tolerance)
    assert kept_from(ranges(1e-3, 1, CUBIC), 1.1) is None
    safe = safe_up_to(ranges(1, 4, CUBIC))
    assert safe == pytest.approx(np.sqrt(3), rel=tolerance)
    assert safe_up_to(ranges(2, 4, CUBIC)) is None


def test_rounded_takes_every_bfloat16_number():
    ranges = rounded(0.5, 1, CUBIC)
    np.testing.assert_array_equal(ranges.start, np.linspace(0.5, 1, 129))
    exact = compose(ranges.start, CUBIC)
    np.testing.assert_array_equal(ranges.low, jnp.asarray(exact, jnp.bfloat16))


@pytest.mark.usefixtures("fast_compilation")
def test_errors_of_the_exact_answer_are_those_of_the_polynomial():
    x = matrix_of(np.geomspace(1, 1e-4, 24), 24, 40).astype(np.float32)
    case = Case(x, "keller")
    shares = np.geomspace(1, 1e-4, 24) / np.linalg.norm(np.geomspace(1, 1e-4, 24))
    values = compose(shares, mc.NS_COEFFS["keller"])
    found = np.linalg.svd(case.exact, compute_uv=False)
    np.testing.assert_allclose(found, np.sort(values)[::-1], rtol=1e-3)
    assert case.relative_error(case.exact) == 0
    assert case.relative_error(1.5 * case.exact) == pytest.approx(0.5)


@pytest.mark.more
def test_lower_precision_shows_in_the_errors():
    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    errors = dict(
        zip(spectra.FORMS, spectra.relative_errors(x, "quintic"), strict=True)
    )
    assert errors["standard", "float32"] < 1e-5
    assert errors["gram", "float32"] < 1e-4
    assert 1e-3 < errors["standard", "bfloat16"] < 0.1


def test_spectra_are_what_they_are_called():
    matrices = synthetic()
    singular = {}
    for name, x in matrices.items():
        gram = x.astype(np.float64) @ x.T.astype(np.float64)
        singular[name] = np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0))[::-1]
    assert all(x.shape == (256, 1024) for x in matrices.values())
    assert singular["1 to 1e-4"][-1] == pytest.approx(1e-4, rel=0.01)
    assert singular["power law 1/k"][9] == pytest.approx(0.1, rel=1e-3)
    assert singular["rank 10"][9] > 0.99 and singular["rank 10"][10] < 1e-5


@pytest.mark.more
def test_momentum_is_the_sum_of_decayed_gradients():
    first, second = spectra.training(2, block=0)
    for name, x in spectra.momentum(2).items():
        kernel = name.split()[0]
        expected = 0.95 * first[kernel] + second[kernel]
        np.testing.assert_allclose(x, expected, atol=1e-6 * abs(expected).max())


def test_an_overflow_is_no_error_of_the_script():
    case = Case(np.eye(3, 5, dtype=np.float32), "keller")
    assert not np.isfinite(case.relative_error(np.full((3, 5), np.inf)))

"""Bounds on what presets make of singular values: certified, and tight."""

import coefficients
import jax.numpy as jnp
import numpy as np
import pytest
from certify import image
from coefficients import certified, rounded
from hypothesis import given, settings
from hypothesis import strategies as st

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
    ranges = getattr(coefficients, name)
    (kept,) = [x for x in np.roots([0.5, 0, -1.5, 0.7]).real if 0 < x < 1]
    found = coefficients.kept_from(ranges(1e-3, 1, CUBIC), 0.7)
    assert found == pytest.approx(kept, rel=tolerance)
    assert coefficients.kept_from(ranges(1e-3, 1, CUBIC), 1.1) is None
    safe = coefficients.safe_up_to(ranges(1, 4, CUBIC))
    assert safe == pytest.approx(np.sqrt(3), rel=tolerance)
    assert coefficients.safe_up_to(ranges(2, 4, CUBIC)) is None


def test_rounded_takes_every_bfloat16_number():
    ranges = rounded(0.5, 1, CUBIC)
    np.testing.assert_array_equal(ranges.start, np.linspace(0.5, 1, 129))
    exact = compose(ranges.start, CUBIC)
    np.testing.assert_array_equal(ranges.low, jnp.asarray(exact, jnp.bfloat16))

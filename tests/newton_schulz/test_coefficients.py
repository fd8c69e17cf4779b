"""Schedules: what they claim, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import one_at_a_time, UNSAFE_CANS
from internals import check_schedule, resolve_schedule

import muonclip_jax as mc


# Output band over [1e-3, 1] from the published tables of each schedule.
BANDS = {
    "keller": (0.47, 1.21),
    "quintic": (0.47, 1.16),
    "polar_express": (0.84, 1.13),
    "polar_express_6": (0.99, 1.01),
    "polar_express_8": (0.999, 1.001),
    "cans": (0.86, 1.13),
    "cubic5": (0.11, 1.31),
    "turbo_muon": (0.14, 1.06),
    "deepseek_v4": (0.99, 1.01),
}


@pytest.mark.parametrize("name", sorted(mc.NS_COEFFS))
def test_preset_maps_its_interval_to_the_published_band(name):
    values = np.geomspace(1e-3, 1, 20_000)
    for a, b, c in mc.NS_COEFFS[name]:
        values = a * values + b * values**3 + c * values**5
    low, high = BANDS[name]
    assert low <= values.min() and values.max() <= high


@pytest.mark.parametrize(
    "dtype, name",
    one_at_a_time(["float16", "bfloat16", "float32", "float64"], sorted(mc.NS_COEFFS)),
)
def test_presets_are_stable_in_every_compute_dtype(name, dtype):
    check_schedule(mc.NS_COEFFS[name], dtype)


def test_presets_are_python_floats_that_cannot_be_changed():
    for schedule in mc.NS_COEFFS.values():
        assert all(type(value) is float for triple in schedule for value in triple)
    with pytest.raises(TypeError):
        mc.NS_COEFFS["keller"] = ()


@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_constant_preset_and_single_triple_run_for_any_number_of_steps(steps):
    keller = (3.4445, -4.7750, 2.0315)
    assert resolve_schedule("keller", steps) == (keller,) * steps
    assert resolve_schedule(keller, steps) == (keller,) * steps


def test_array_of_triples_is_accepted():
    assert resolve_schedule(jnp.asarray(mc.NS_COEFFS["keller"]), 5)[0][
        0
    ] == pytest.approx(3.4445)


@pytest.mark.parametrize(
    "coeffs",
    [
        (10.0, 10.0, 10.0),
        (1.0, -3.0, 1.0),
        (float("nan"), 0.0, 0.0),
        # The table printed in the Gram Newton-Schulz post, whose third column is off.
        (8.156554524902461, -22.48329292557795, 16.3737),
    ],
)
def test_schedules_that_diverge_or_change_sign_are_refused(coeffs):
    with pytest.raises(ValueError, match=r"unstable coeffs in float32.*singular value"):
        mc.newton_schulz(jnp.eye(3), coeffs=coeffs, steps=5)


def test_a_schedule_that_only_float32_can_bear_is_refused_in_bfloat16():
    mc.newton_schulz(jnp.eye(3), coeffs=UNSAFE_CANS)
    with pytest.raises(ValueError, match="unstable coeffs in bfloat16"):
        mc.newton_schulz(jnp.eye(3), coeffs=UNSAFE_CANS, dtype=jnp.bfloat16)

"""More steps take no more memory, and steps of every number are right."""

import jax
import numpy as np
import pytest
from helpers import assert_close, normal, of_newton_schulz, polynomial_of

import muonclip_jax as mc


KELLER = mc.NS_COEFFS["keller"][0]
STABLE = (1.5, -0.5, 0.0)


def compiled(x, **options):
    lowered = jax.jit(lambda x: mc.newton_schulz(x, **options)).lower(x)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.more
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators write it out")
def test_more_steps_take_no_more_memory():
    x = normal(0, 1, 256, 512)
    options = {"method": "standard", "coeffs": STABLE}
    memory = compiled(x, **options, steps=2)
    for steps in (8, 12):
        assert compiled(x, **options, steps=steps) <= 1.05 * memory


@pytest.mark.parametrize("steps", [3, 4, 5, 7])
@pytest.mark.parametrize("coeffs", [KELLER, "mixed"])
def test_passes_of_unequal_length(coeffs, steps):
    """Where the last pass is shorter or longer."""
    if coeffs == "mixed":
        coeffs = tuple((1.5 + i / 20, -0.5 - i / 30, i / 100) for i in range(steps))
    schedule = [coeffs] * steps if isinstance(coeffs[0], float) else coeffs
    x = normal(1, 3, 8, 40)
    y = mc.newton_schulz(x, coeffs=coeffs, steps=steps, method="gram")
    expected = np.stack([polynomial_of(matrix, schedule) for matrix in np.float64(x)])
    assert_close(y, expected, of_newton_schulz(40, schedule))

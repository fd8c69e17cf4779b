"""Newton-Schulz against the exact polynomial, the polar factor and its slope.

All of these are in float64.
"""

import dataclasses
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    few,
    matrix_of,
    normal,
    of_newton_schulz,
    one_at_a_time,
    polynomial_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import muonclip_jax as mc


SHAPES = [(8, 8), (5, 17), (17, 5), (1, 6), (6, 1), (32, 64)]
IN_BLOCKS = [(512, 512), (300, 700), (257, 1029)]  # of hermitian products
SMALL = [(1, 1), (2, 2), (1, 12), (9, 1), (2, 3), (3, 2), (4, 11), (12, 12), (12, 7)]


def relative_error(x, reference):
    return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(
        reference
    )


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize(
    "name, shape",
    few(
        [("keller", shape) for shape in (*SHAPES, *IN_BLOCKS)]
        + [(name, (5, 17)) for name in sorted(mc.NS_COEFFS)],
        *(("keller", shape) for shape in SHAPES[::3]),
        ("polar_express", (5, 17)),
    ),
)
def test_equals_the_composed_polynomial(shape, method, name):
    schedule = mc.NS_COEFFS[name]
    x = matrix_of(np.geomspace(1, 1e-2, min(shape)), *shape)
    y = mc.newton_schulz(jnp.asarray(x, jnp.float32), coeffs=name, method=method)
    assert relative_error(y, polynomial_of(x, schedule)) < 2e-4


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_deepseek_schedule_reaches_the_polar_factor(method):
    x = matrix_of(np.geomspace(1, 1e-4, 16), 16, 48)
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    y = mc.newton_schulz(
        jnp.asarray(x, jnp.float32), coeffs="deepseek_v4", method=method
    )
    assert relative_error(y, u @ vt) < 2e-3


def test_dtype_sets_the_iteration_and_not_the_result():
    x = jnp.asarray(matrix_of(np.geomspace(1, 0.05, 24), 24, 40), jnp.float32)
    low, high = mc.newton_schulz(x, dtype=jnp.bfloat16), mc.newton_schulz(x)
    chex.assert_type([low, high], jnp.float32)
    assert 1e-4 < relative_error(low, np.asarray(high)) < 0.05


def test_float64_and_complex_inputs():
    with jax.enable_x64(True):
        x = matrix_of(np.geomspace(1, 1e-3, 8), 8, 12)
        y = mc.newton_schulz(jnp.asarray(x))
        assert y.dtype == jnp.float64
        assert relative_error(y, polynomial_of(x, mc.NS_COEFFS["keller"])) < 1e-12
        phased = x * np.exp(0.7j)
        turned = np.asarray(mc.newton_schulz(jnp.asarray(phased)))
        np.testing.assert_allclose(turned, np.asarray(y) * np.exp(0.7j), atol=1e-12)
        low = mc.newton_schulz(jnp.asarray(phased), dtype=jnp.float32)
        np.testing.assert_allclose(low, turned, atol=1e-4)


@pytest.mark.parametrize(
    "magnitude, method",
    one_at_a_time([1e-34, 1e-30, 1e-12, 1.0, 1e12, 1e30, 6e38], ["standard", "gram"]),
)
def test_scale_of_the_input_does_not_matter(magnitude, method):
    x = matrix_of(np.geomspace(1, 0.1, 6), 6, 9)
    expected = polynomial_of(x, mc.NS_COEFFS["keller"])
    y = mc.newton_schulz(jnp.asarray(x * magnitude, jnp.float32), method=method)
    assert relative_error(y, expected) < 1e-3


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_extreme_entries_come_out_finite(dtype, method):
    info = jnp.finfo(dtype)
    for value in (0.0, info.tiny, info.smallest_subnormal, info.max):
        y = mc.newton_schulz(jnp.full((4, 6), float(value), dtype), method=method)
        assert jnp.isfinite(y).all()
        assert value != 0 or (y == 0).all()


def test_stacks_are_iterated_matrix_by_matrix():
    stack = normal(0, 2, 3, 5, 7)
    stack = stack * jnp.geomspace(1e-20, 1e20, 6).reshape(2, 3, 1, 1)
    whole = mc.newton_schulz(stack)
    for i in np.ndindex(2, 3):
        assert_close(whole[i], mc.newton_schulz(stack[i]), of_newton_schulz(7))


@pytest.mark.more
@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(SMALL),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
)
def test_singular_values_land_in_the_band_and_vectors_stay(shape, seed, exponent):
    values = np.random.default_rng(seed).uniform(0.05, 1, min(shape))
    x = matrix_of(values, *shape, seed)
    y = np.float64(mc.newton_schulz(jnp.asarray(x * 10.0**exponent, jnp.float32)))
    singular = np.linalg.svd(y, compute_uv=False)
    assert singular.min() > 0.6 and singular.max() < 1.21
    # x^T y is symmetric and positive: the singular vectors are those of x.
    product = x.T @ y
    np.testing.assert_allclose(product, product.T, atol=1e-3)
    assert np.linalg.eigvalsh((product + product.T) / 2).min() > -1e-3


def test_one_triple_stays_one_for_other_steps():
    """A value with one field changed is that of the same arguments."""
    triple = np.asarray(mc.NS_COEFFS["keller"][0])
    five = mc.NewtonSchulz(triple)
    assert dataclasses.replace(five, steps=8) == mc.NewtonSchulz(triple, steps=8)
    schedule = mc.NS_COEFFS["quintic"]
    two = mc.NewtonSchulz(list(schedule), steps=2)
    x = normal(0, 4, 6)
    for value, expected in (
        (dataclasses.replace(five, steps=8), (triple,) * 8),
        (dataclasses.replace(two, steps=None), schedule),
        (two, schedule[:2]),
    ):
        of_x = value.orthogonalize(x)
        np.testing.assert_array_equal(of_x, mc.newton_schulz(x, tuple(expected)))


def test_transposition_commutes():
    x = normal(1, 7, 12)
    assert_close(mc.newton_schulz(x).T, mc.newton_schulz(x.T), of_newton_schulz(12))


def test_one_compilation_per_distinct_shape(caplog):
    x = normal(2, 9, 11)
    compiled = []
    for y in (x, x + 1, x.T, jnp.stack([x] * 3), jnp.stack([x + 1] * 3)):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            mc.newton_schulz(y)
        compiled.append(caplog.text.count("Compiling"))
    assert compiled == [1, 0, 1, 1, 0]


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


X, WEIGHTS = normal(0, 3, 4, 7), normal(1, 3, 4, 7)


def gradient(x, **options):
    def loss(x):
        return jnp.sum(mc.newton_schulz(x, steps=3, **options) * WEIGHTS)

    return np.asarray(jax.grad(loss)(x), np.float64)


def by_differences(x, step=1e-5):
    """Of the naive loop, in float64."""

    def loss(x):
        y = x / np.sqrt((x**2).sum((-2, -1), keepdims=True))
        for a, b, c in mc.NS_COEFFS["keller"][:3]:
            gram = y @ y.swapaxes(-2, -1)
            y = a * y + (b * gram + c * gram @ gram) @ y
        return (y * np.asarray(WEIGHTS, np.float64)).sum()

    x, found = np.asarray(x, np.float64), np.zeros(x.shape)
    for i in np.ndindex(*x.shape):
        shift = np.zeros(x.shape)
        shift[i] = step
        found[i] = (loss(x + shift) - loss(x - shift)) / (2 * step)
    return found


@pytest.mark.parametrize(
    "method, scale",
    one_at_a_time(["standard", "gram"], [1.0, 1e-30, 1e-16, 1e16, 1e30]),
)
def test_every_scale(scale, method):
    expected = by_differences(X)
    actual = gradient(X * scale, method=method) * scale
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("preconditioning", ["frobenius", "aol", "equilibrated"])
def test_zero_matrices_have_none(preconditioning):
    for x in (X.at[1].set(0.0), X.at[:].set(0.0), X.at[1, 2].set(0.0)):
        found = gradient(x, preconditioning=preconditioning)
        assert np.isfinite(found).all()
        is_zero = ~np.asarray(x).any((1, 2))
        assert not found[is_zero].any() and found[~is_zero].any((1, 2)).all()

"""What rounding does to the two forms, in every dtype, by spectrum."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    few,
    matrix_of,
    matrix_with,
    normal,
    of_newton_schulz,
    polynomial_of,
    spectra,
    UNSAFE_CANS,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import solver

import muonclip_jax as mc


SPECTRA = list(spectra(96))
PRESETS = sorted(mc.NS_COEFFS)


def orthogonalized(x, name, **options):
    y = mc.newton_schulz(jnp.asarray(x, jnp.float32), name, **options)
    return np.asarray(y, np.float64)


@functools.cache
def exact_of(spectrum, name):
    return polynomial_of(matrix_with(spectrum), mc.NS_COEFFS[name])


def error_of(spectrum, name, **options):
    exact = exact_of(spectrum, name)
    difference = orthogonalized(matrix_with(spectrum), name, **options) - exact
    return np.linalg.norm(difference) / np.linalg.norm(exact)


@pytest.mark.more
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", few(PRESETS, "keller"))
def test_gram_in_half_precision_is_within_twice_the_error_of_standard(name, spectrum):
    standard = error_of(spectrum, name, method="standard", dtype="bfloat16")
    assert error_of(spectrum, name, method="gram", dtype="bfloat16") < 2 * standard
    assert error_of(spectrum, name, method="gram", dtype="float16") < standard


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", few(PRESETS, "keller"))
def test_gram_in_float32_equals_standard(name, spectrum):
    """To 1e-5, or to what rounding does to a steep schedule.

    What the first step rounds is magnified by the slope at 0 of all steps. Roundings of
    15 products add up to `sqrt(15)` of one, and twice that is seldom. They depend on a
    processor's order of sums, so both forms are compared with exact numbers.
    """
    x = matrix_with(spectrum)
    standard, gram = (
        np.abs(orthogonalized(x, name, method=method) - exact_of(spectrum, name)).max()
        for method in ("standard", "gram")
    )
    slope = math.prod(a for a, _, _ in mc.NS_COEFFS[name])
    rounding = 2**-24 * slope * np.abs(x).max() / np.linalg.norm(x)
    assert gram < max(1e-5, 3 * standard, 2 * math.sqrt(15) * rounding)


@pytest.mark.more
@settings(max_examples=20, deadline=None)
@given(
    exponent=st.floats(0, 8),
    rank=st.integers(1, 24),
    name=st.sampled_from(PRESETS),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 2**31),
)
def test_no_spectrum_makes_gram_diverge(exponent, rank, name, dtype, seed):
    x = matrix_of(np.geomspace(1, 10**-exponent, rank), 24, 72, seed)
    y = orthogonalized(x, name, method="gram", dtype=dtype)
    # 1.21 is the top of Keller's band, the widest; the rest is rounding in bfloat16.
    assert np.linalg.norm(y, 2) < 1.35


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_products_and_sums_are_rounded_once(method):
    """In bfloat16 are operands of products, and nothing is computed."""
    iterate = functools.partial(mc.newton_schulz, method=method, dtype="bfloat16")
    program = str(jax.make_jaxpr(iterate)(normal(0, 2, 8, 24)))
    made = {*re.findall(r":bf16\[\S*\] = (\w+)", program)}
    assert "optimization_barrier" in made and made.isdisjoint(
        {"add", "dot_general", "mul", "sub"}
    )


@pytest.mark.parametrize(
    "platform, dtype", [("cpu", "float32"), ("gpu", "float16"), ("tpu", "bfloat16")]
)
def test_each_platform_iterates_in_the_dtype_it_multiplies_fastest(platform, dtype):
    for given_dtype in ("float32", "bfloat16", "float16"):
        assert solver(platform).iteration_dtype(jnp.dtype(given_dtype)) == dtype
    for given_dtype in ("float64", "complex64"):
        wide = solver(platform).iteration_dtype(jnp.dtype(given_dtype))
        assert wide == given_dtype
    for asked in ("float32", "float16"):
        chosen = solver(platform, dtype=asked).iteration_dtype(jnp.dtype("bfloat16"))
        assert chosen == asked


def test_coefficients_that_only_float32_bears_are_iterated_in_it():
    for platform in ("cpu", "gpu", "tpu"):
        unsafe = solver(platform, coeffs=UNSAFE_CANS)
        assert unsafe.iteration_dtype(jnp.dtype("float32")) == jnp.float32


def test_bfloat16_input_loses_nothing_on_cpu():
    x = jnp.asarray(matrix_with("power law"), jnp.bfloat16)
    y = mc.newton_schulz(x)
    expected = mc.newton_schulz(x.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(expected))


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (3, 12, 12)])
def test_aol_is_the_iteration_of_the_rescaled_matrix(shape):
    x = np.random.default_rng(0).normal(size=shape)
    wide = x if shape[-2] <= shape[-1] else x.swapaxes(-1, -2)
    gram = wide @ wide.swapaxes(-1, -2)
    scaled = wide / np.sqrt(np.abs(gram).sum(axis=-1, keepdims=True))
    expected = np.stack(
        [
            polynomial_of(matrix, mc.NS_COEFFS["turbo_muon"], norm=1.0)
            for matrix in scaled.reshape(-1, *scaled.shape[-2:])
        ]
    ).reshape(scaled.shape)
    y = orthogonalized(x, "turbo_muon", preconditioning="aol")
    if wide is not x:
        y = y.swapaxes(-1, -2)
    assert_close(y, expected, of_newton_schulz(30, mc.NS_COEFFS["turbo_muon"]))


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (3, 12, 12)])
def test_equilibrated_is_the_iteration_of_even_rows_and_columns(shape):
    generator = np.random.default_rng(0)
    x = generator.normal(size=shape) * np.exp(generator.normal(size=shape[-1:]))
    x *= np.exp(generator.normal(size=(shape[-2], 1)))
    results = []
    for matrix in x.reshape(-1, *shape[-2:]):
        wide = matrix if shape[-2] <= shape[-1] else matrix.T
        even = wide
        for axis in (1, 0):
            squares = np.square(even).sum(axis, keepdims=True)
            even = even / np.sqrt(squares + 1e-6 * squares.mean())
        y = polynomial_of(even, mc.NS_COEFFS["keller"], norm=np.linalg.norm(even))
        results.append(y if wide is matrix else y.T)
    y = orthogonalized(x, "keller", preconditioning="equilibrated")
    assert_close(y, np.reshape(results, shape), of_newton_schulz(30))


def test_equilibrated_lifts_no_noise():
    """Rows and columns of nothing stay so, and a row of rounding errors stays small."""
    x = np.zeros((2, 6, 8))
    x[0, 1:, 2:] = np.random.default_rng(0).normal(size=(5, 6))
    x[0, 1] *= 1e-8
    y = orthogonalized(x, "keller", preconditioning="equilibrated")
    assert not y[1].any() and not y[0, 0].any() and not y[0, :, :2].any()
    assert np.linalg.norm(y[0, 1]) < 0.05 < 0.5 < np.linalg.norm(y[0, 2])


def test_aol_keeps_zero_rows_and_zero_matrices():
    x = np.zeros((2, 4, 6))
    x[0, 1:] = np.random.default_rng(0).normal(size=(3, 6))
    y = orthogonalized(x, "turbo_muon", preconditioning="aol")
    assert not y[1].any() and not y[0, 0].any()
    np.testing.assert_allclose(np.linalg.svd(y[0])[1][:3], 1, atol=0.1)


def test_muon_passes_its_options_on():
    params = {"w": normal(0, 6, 24)}
    own = mc.NewtonSchulz(
        "turbo_muon", preconditioning="aol", method="gram", dtype="bfloat16"
    )
    tx = mc.scale_by_muon(orthogonalizer=own, consistent_rms=None)
    updates, _ = tx.update(params, tx.init(params))
    expected = own.orthogonalize(params["w"] * 1.95)
    np.testing.assert_allclose(updates["w"], expected * 2, atol=1e-5)

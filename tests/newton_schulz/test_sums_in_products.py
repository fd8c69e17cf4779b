"""What GPUs do in float16, here on CPU: products that carry their sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    few,
    matrix_of,
    normal,
    polynomial_of,
)
from internals import solver

import muonclip_jax as mc


#: Those of the table of errors, `benchmarks/float16_on_gpu.py`.
SHAPE = (256, 1024)
SPECTRA = {
    "Gaussian": None,
    "power law": 1 / np.arange(1, 257),
    "1 to 1e-4": np.geomspace(1, 1e-4, 256),
    "1 to 1e-8": np.geomspace(1, 1e-8, 256),
    "rank 1": [1.0],
    "rank 10": np.ones(10),
}
PRESETS = sorted(mc.NS_COEFFS)


@functools.cache
def matrix_with(spectrum):
    return matrix_of(SPECTRA[spectrum], *SHAPE)


def on_gpu(adds=True, **options):
    """The solver for GPU, whose products carry their sums or, as before, do not."""
    its = solver("gpu", **options)
    own = dataclasses.replace(its.platform, adds_in_products=adds)
    return jax.jit(dataclasses.replace(its, platform=own).orthogonalize)


def relative_error(x, schedule, adds=True, **options):
    y = np.float64(on_gpu(adds, coeffs=schedule, **options)(jnp.float32(x)))
    steps = mc.NS_COEFFS[schedule] if isinstance(schedule, str) else schedule
    exact = np.stack([polynomial_of(matrix, steps) for matrix in x])
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("spectrum", few(SPECTRA, "Gaussian"))
@pytest.mark.parametrize("name", few(PRESETS, "keller"))
def test_errors_are_at_most_a_quarter_larger(name, spectrum):
    """Than with float32 between products, where each sum is a kernel of its own."""
    x = matrix_with(spectrum)[None]
    before = relative_error(x, name, adds=False)
    assert relative_error(x, name) < 1.25 * before


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (3, 5), (1, 7), (7, 1), (1, 1)])
def test_of_any_shape(shape):
    x = np.random.default_rng(0).normal(size=(2, *shape))
    assert relative_error(x, "keller") < 0.02


@pytest.mark.parametrize(
    "triple, steps",
    [
        ((1.5, -0.5, 0.0), 20),  # X would leave float16 if it were not lifted
        ((0.8, 0.4, -0.2), 20),  # it would grow beyond
        ((1.5, 0.0, -0.5), 3),  # without a b the form does not exist
    ],
)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_many_steps_and_steps_without_a_part(method, triple, steps):
    x = np.stack([matrix_of(np.geomspace(1, 0.1, 20), 20, 60)])
    error = relative_error(x, (triple,) * steps, method=method)
    assert error < 0.01  # no step but the first few lifts an error


def gradient(function, x, weights):
    return np.float64(jax.grad(lambda x: jnp.sum(function(x) * weights))(x))


def off(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.more
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_derivatives(method):
    """Forward, backward and under `vmap`: those of the same steps in float32.

    As near to them as with float32 between products.
    """
    x, weights = normal(0, 3, 4, 7), normal(1, 3, 4, 7)
    short, before = on_gpu(method=method), on_gpu(adds=False, method=method)
    exact = on_gpu(method=method, dtype="float32")
    found, expected = (gradient(f, x, weights) for f in (short, exact))
    assert off(found, expected) < 2 * off(gradient(before, x, weights), expected)
    _, forward = jax.jvp(short, (x,), (weights,))
    assert np.vdot(forward, weights) == pytest.approx(np.vdot(found, weights), rel=0.05)
    apart = jax.vmap(lambda x: short(x[None])[0])(x)
    np.testing.assert_allclose(apart, short(x), atol=0.01)


def test_a_program_for_three_platforms():
    exported = jax.export.export(
        jax.jit(mc.newton_schulz), platforms=("cpu", "cuda", "tpu")
    )(jax.ShapeDtypeStruct((2, 8, 24), jnp.float32))
    text = exported.mlir_module()
    # For CUDA a product of float16 leaves in float16: cuBLAS rounds it after the sum.
    # For a CPU the same product leaves in float32.
    products = [x for x in text.splitlines() if "dot_general" in x and "xf16>" in x]
    assert 2 * sum(x.count("xf16>") == 3 for x in products) == len(products) > 0
    x = normal(0, 2, 8, 24)
    np.testing.assert_allclose(exported.call(x), mc.newton_schulz(x), atol=1e-6)

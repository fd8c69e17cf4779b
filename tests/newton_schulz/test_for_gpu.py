"""What is done for GPU, run on CPU: the iteration in float16, sums in products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    few,
    matrix_of,
    matrix_with,
    more,
    normal,
    one_at_a_time,
    polynomial_of,
    spectra,
    tolerance,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import solver

import muonclip_jax as mc


SPECTRA = {**spectra(96), "half of them": np.r_[np.ones(48), np.full(48, 1e-3)]}
del SPECTRA["gaussian"], SPECTRA["condition 1e8"]


def for_gpu(x, name="keller", method="auto", **options):
    on_gpu = solver("gpu", coeffs=name, method=method, **options)
    y = jax.jit(on_gpu.orthogonalize)(jnp.float32(x))
    assert y.dtype == jnp.float32
    return np.asarray(y, np.float64)


def relative_error(y, exact):
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


@pytest.mark.more
@pytest.mark.parametrize(
    "spectrum, method", one_at_a_time(SPECTRA, ["standard", "gram"])
)
@pytest.mark.parametrize("name", few(sorted(mc.NS_COEFFS), "keller"))
def test_float16_is_more_exact_than_bfloat16(name, spectrum, method):
    x = matrix_of(SPECTRA[spectrum], 96, 320)
    exact = polynomial_of(x, mc.NS_COEFFS[name])
    short = mc.newton_schulz(
        jnp.float32(x), coeffs=name, method="standard", dtype="bfloat16"
    )
    bound = relative_error(np.float64(short), exact)
    assert relative_error(for_gpu(x, name, method), exact) < bound


@pytest.mark.parametrize(
    "x",
    [
        np.eye(1, 300),
        np.ones((1, 300)),
        np.ones((64, 300)),
        np.eye(64, 300),
        np.eye(64, 300) * (np.arange(64) < 63)[:, None],  # a row of zeros
        np.eye(64, 300) * np.where(np.arange(64) < 1, 1, 1e-6)[:, None],
        np.zeros((64, 300)),
    ],
    ids=["entry", "row", "ones", "identity", "zero row", "one large row", "zeros"],
)
@pytest.mark.parametrize(
    "name", ["keller", more("deepseek_v4"), more("polar_express_6")]
)
def test_float16_holds_what_is_far_from_even(x, name):
    exact = polynomial_of(x, mc.NS_COEFFS[name]) if x.any() else x
    assert np.abs(for_gpu(x, name, "gram") - exact).max() < 0.02
    assert np.abs(for_gpu(x, name, "standard") - exact).max() < 0.02


@pytest.mark.parametrize("preconditioning", ["aol", "equilibrated"])
def test_preconditioned_matrices_fit_float16(preconditioning):
    x = np.float64(normal(0, 64, 200))
    y = for_gpu(x, "polar_express", preconditioning=preconditioning)
    assert np.linalg.svd(y)[1] == pytest.approx(np.ones(64), abs=0.15)


def test_the_norm_of_many_of_the_largest_numbers_is_finite():
    x = jnp.full((64, 64), jnp.finfo("float32").max)
    y = for_gpu(x, "polar_express")
    np.testing.assert_allclose(y, np.full((64, 64), 1 / 64), rtol=0.05)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_does_not_pass_for_a_result(bad):
    assert np.isnan(for_gpu(normal(0, 8, 20).at[2, 3].set(bad))).any()


@pytest.mark.more
@settings(max_examples=15, deadline=None)
@given(
    a=st.floats(1, 4),
    c=st.floats(0, 0.5),
    method=st.sampled_from(["standard", "gram"]),
    steps=st.integers(1, 4),
)
def test_any_triple(a, c, method, steps):
    triple = (a, 1 - a - c, c)  # leaves 1 where it is
    schedule = (triple,) * steps
    try:
        solver(coeffs=schedule, steps=steps, method="gram", dtype=jnp.float16)
    except ValueError:
        return  # unstable
    x = matrix_of(np.geomspace(1, 0.1, 20), 20, 60)
    y = for_gpu(x, schedule, method)
    assert relative_error(y, polynomial_of(x, schedule)) < 0.01


@pytest.mark.parametrize(
    "method, platform, triple",
    one_at_a_time(
        ["standard", "gram"],
        ["cpu", "gpu", "tpu"],
        [(0.0, 2.0, -1.0), (1.5, 0.0, -0.5), (2.0, -1.0, 0.0)],
    ),
)
def test_triples_with_a_zero(triple, platform, method):
    """Without a slope nothing of X is kept, and zeros stay zeros."""
    schedule = (triple,) * 2
    x = matrix_of(np.linspace(1, 0.5, 12), 12, 30)
    both = jnp.float32(np.stack([x, np.zeros_like(x)]))
    there = solver(platform, coeffs=schedule, steps=2, method=method, dtype=jnp.float32)
    y = jax.jit(there.orthogonalize)(both)
    # The slopes of all three are at most two, here where singular values are under one.
    share = tolerance(jnp.float32, size=30, slopes=(2.0, 2.0))
    assert_close(y[0], polynomial_of(x, schedule), share)
    assert not y[1].any()


#: Those of the table of errors, `benchmarks/float16_on_gpu.py`.
OF_THE_TABLE = [name for name in spectra(256) if name != "even"]


def on_gpu(adds=True, **options):
    """The solver for GPU, whose products carry their sums or, as before, do not."""
    its = solver("gpu", **options)
    own = dataclasses.replace(its.platform, adds_in_products=adds)
    return jax.jit(dataclasses.replace(its, platform=own).orthogonalize)


def error_on_gpu(x, schedule, adds=True, **options):
    y = np.float64(on_gpu(adds, coeffs=schedule, **options)(jnp.float32(x)))
    steps = mc.NS_COEFFS[schedule] if isinstance(schedule, str) else schedule
    return relative_error(y, np.stack([polynomial_of(matrix, steps) for matrix in x]))


@pytest.mark.parametrize("spectrum", few(OF_THE_TABLE, "gaussian"))
@pytest.mark.parametrize("name", few(sorted(mc.NS_COEFFS), "keller"))
def test_errors_are_at_most_a_quarter_larger(name, spectrum):
    """Than with float32 between products, where each sum is a kernel of its own."""
    x = matrix_with(spectrum, 256, 1024)[None]
    before = error_on_gpu(x, name, adds=False)
    assert error_on_gpu(x, name) < 1.25 * before


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (3, 5), (1, 7), (7, 1), (1, 1)])
def test_of_any_shape(shape):
    x = np.random.default_rng(0).normal(size=(2, *shape))
    assert error_on_gpu(x, "keller") < 0.02


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
    error = error_on_gpu(x, (triple,) * steps, method=method)
    assert error < 0.01  # no step but the first few lifts an error


def gradient(function, x, weights):
    return np.float64(jax.grad(lambda x: jnp.sum(function(x) * weights))(x))


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
    before = gradient(before, x, weights)
    assert relative_error(found, expected) < 2 * relative_error(before, expected)
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

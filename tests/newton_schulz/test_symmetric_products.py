"""The kernel for symmetric products on TPU, interpreted, against float64 products."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import more
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import platform_with, solver
from internals import tpu_kernel as tpu
from jax.experimental.pallas import tpu as pltpu

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


TILE = (16, 32)

#: Below one tile, within one block, ragged in both directions, in several steps of n.
SHAPES = [(1, 5, 1), (1, 64, 128), (3, 75, 300)]


def product(x, y, **options):
    return tpu.symmetric_product(x, y, tile=TILE, interpret=True, **options)


def normal(*shape, seed=0, dtype=jnp.bfloat16):
    return helpers.normal(seed, *shape, dtype=dtype)


def symmetric(count, m, seed=0, dtype=jnp.bfloat16):
    x = normal(count, m, m, seed=seed, dtype=jnp.float32)
    return (x + x.mT).astype(dtype)


def mirrored(x):
    """What is on and below the diagonal, and its transpose above."""
    return np.tril(x) + np.tril(x, -1).mT


def check(out, x, y, scale=1.0, addend=None):
    """Within the rounding of float32 sums in any order, and symmetric to the bit."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    extra = 0.0 if addend is None else np.asarray(addend, np.float64)
    expected = mirrored(scale * x @ y.mT + extra)
    size = mirrored(abs(scale) * abs(x) @ abs(y).mT + abs(extra))
    bound = (x.shape[-1] + 3) * np.finfo(np.float32).eps * size
    np.testing.assert_array_less(abs(np.asarray(out, np.float64) - expected), bound)
    np.testing.assert_array_equal(out, out.mT)


@pytest.mark.parametrize("shape", SHAPES)
def test_gram_matrix(shape):
    x = normal(*shape)
    gram = product(x, x, out_dtype=jnp.float32)
    check(gram, x, x)
    # A kernel may read an array that comes twice only once.
    np.testing.assert_array_equal(gram, product(x, jnp.array(x), out_dtype=jnp.float32))


@pytest.mark.parametrize(("count", "m"), [(1, 9), (3, 75)])
def test_product_of_symmetric_matrices(count, m):
    """Rounded factors commute only nearly: the lower half of the product counts."""
    r = symmetric(count, m)
    p, q = (z.astype(jnp.bfloat16) for z in (r @ r, r @ r @ r - 2 * r))
    p, q = (jnp.asarray(mirrored(z)) for z in (p, q))
    check(product(p, q, out_dtype=jnp.float32), p, q)


def test_scaled_and_shifted():
    x, addend = normal(2, 40, 70), symmetric(2, 40, seed=1)
    options = {"addend": addend, "scale": -2.0, "shift": 0.25}
    out = product(x, x, out_dtype=jnp.float32, **options)
    check(out, x, x, scale=-2.0, addend=0.25 * np.asarray(addend, np.float64))
    # Rounded once, at the end, to the dtype of x if none is given.
    rounded = product(x, x, **options)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, out.astype(jnp.bfloat16))


def test_float16_and_float32_operands():
    x = normal(1, 20, 30, dtype=jnp.float16)
    addend = symmetric(1, 20, dtype=jnp.float32)
    out = product(x, x, addend=addend, shift=1.0, out_dtype=addend.dtype)
    check(out, x, x, addend=addend)
    assert product(x, x).dtype == jnp.float16


@pytest.mark.more
@settings(max_examples=4, deadline=None)
@given(
    count=st.integers(1, 3),
    m=st.integers(1, 50),
    n=st.integers(1, 140),
    seed=st.integers(0, 99),
)
def test_any_shape(count, m, n, seed):
    x, addend = normal(count, m, n, seed=seed), symmetric(count, m, seed=seed + 1)
    out = product(x, x, addend=addend, scale=0.5, shift=1.0, out_dtype=jnp.float32)
    check(out, x, x, scale=0.5, addend=addend)


@settings(deadline=None)
@given(m=st.integers(1, 300), edge=st.integers(1, 64))
def test_lower_tiles_cover_the_lower_half_once(m, edge):
    covered = np.zeros((m, m), int)
    for row, column in zip(*tpu.lower_tiles(m, edge), strict=True):
        i, j = row * edge, column * edge
        covered[i : i + edge, j : j + edge] += 1
    assert np.all(covered <= 1)
    assert np.all(covered[np.tril_indices(m)] == 1)
    assert covered.sum() <= m * (m + edge) / 2


@settings(deadline=None)
@given(m=st.integers(1, 10_000), n=st.integers(1, 30_000))
def test_blocks_fit_the_memory_of_a_tpu(m, n):
    plan = tpu._Tiling.choose((1, m, n), None, gram=False)
    factors = 2 * 2 * 2 * plan.edge * plan.depth
    squares = (4 + 2 * 4 + 2 * 4) * plan.edge**2  # the sum, output and addend
    assert factors + squares < tpu._VMEM_BYTES
    assert plan.edge % plan.tile == 0
    assert plan.depth * (plan.steps - 1) < n <= plan.depth * plan.steps


@pytest.mark.parametrize("shape", [(24, 768, 3072), (2, 1100, 7)])
@pytest.mark.parametrize("addend_dtype", [None, jnp.float32])
def test_lowers_without_the_hardware(shape, addend_dtype):
    count, m, _ = shape
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    addend = addend_dtype and jax.ShapeDtypeStruct((count, m, m), addend_dtype)

    @jax.jit
    def f(x, addend):
        return tpu.symmetric_product(x, x, addend=addend, shift=2.0)

    lowered = f.trace(x, addend).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize("shape", [(2, 8, 5), (1, 8, 4), (8, 5)])
def test_wants_two_stacks_of_one_shape(shape):
    with pytest.raises(ValueError, match="two stacks"):
        product(normal(1, 8, 5), normal(*shape))


def test_wants_one_dtype():
    with pytest.raises(ValueError, match="two stacks"):
        product(normal(1, 8, 5), normal(1, 8, 5, dtype=jnp.float32))


@pytest.mark.parametrize("shape", [more((3, 70, 300)), (1, 50, 128)])
def test_simulated_memory_of_a_tpu(shape):
    """Two cores, copies as late as they may be, and NaN where nothing was written."""
    x, addend = normal(*shape), symmetric(shape[0], shape[1], seed=1)
    simulator = pltpu.InterpretParams(
        num_cores_or_threads=2, uninitialized_memory="nan"
    )
    out = tpu.symmetric_product(
        x,
        x,
        addend=addend,
        shift=1.0,
        out_dtype=jnp.float32,
        tile=TILE,
        interpret=simulator,
    )
    check(out, x, x, addend=addend)


@pytest.mark.parametrize("shape", [(40, 40), more((2, 24, 80)), more((80, 24))])
def test_the_iteration_by_kernels_is_that_by_xla(monkeypatch, shape):
    interpreted = functools.partial(tpu.symmetric_product, tile=TILE, interpret=True)
    monkeypatch.setattr(tpu, "symmetric_product", interpreted)
    x = normal(*shape, dtype=jnp.float32)
    exact = np.asarray(mc.newton_schulz(x, method="standard"), np.float64)
    errors = []
    with platform_with("tpu", kernel_rows=16):
        for kernel in ("xla", "pallas"):
            (y,) = solver("tpu", dtype="bfloat16", kernel=kernel).orthogonalize(x)
            errors.append(np.linalg.norm(y - exact) / np.linalg.norm(exact))
    assert 0 < errors[1] < 2 * errors[0] < 0.2


@pytest.mark.more
def test_an_update_by_kernels_lowers_without_hardware():
    params = {"w": jax.ShapeDtypeStruct((2048, 4096), jnp.float32)}
    tx = mc.muon(1e-3, ns_kernel="pallas")
    state = jax.eval_shape(tx.init, params)
    traced = jax.jit(tx.update).trace(params, state, params)
    lowered = traced.lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()

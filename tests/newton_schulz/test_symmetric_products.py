"""The kernels for symmetric products, interpreted, against float64 products."""

import functools
import inspect

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

import muonclip_jax as mc
from muonclip_jax._newton_schulz import platforms
from muonclip_jax._newton_schulz.kernels import gpu, tpu
from muonclip_jax._newton_schulz.kernels.tiles import lower_tiles
from muonclip_jax._newton_schulz.solver import make_solver, Solver


pytestmark = pytest.mark.usefixtures("fast_compilation")


MODULES = {"tpu": tpu, "gpu": gpu}
TILES = {"tpu": (16, 32), "gpu": (16, 16)}

#: Below one tile, within one block, ragged in both directions, in several steps of n.
SHAPES = [(1, 5, 1), (1, 64, 128), (3, 75, 300)]

each_platform = pytest.mark.parametrize("platform", MODULES)


def product(platform, x, y, **options):
    module, tile = MODULES[platform], TILES[platform]
    return module.symmetric_product(x, y, tile=tile, interpret=True, **options)


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


@each_platform
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_matrix(platform, shape):
    x = normal(*shape)
    gram = product(platform, x, x, out_dtype=jnp.float32)
    check(gram, x, x)
    # A kernel may read an array that comes twice only once.
    np.testing.assert_array_equal(
        gram, product(platform, x, jnp.array(x), out_dtype=jnp.float32)
    )


@each_platform
@pytest.mark.parametrize(("count", "m"), [(1, 9), (3, 75)])
def test_product_of_symmetric_matrices(platform, count, m):
    """Rounded factors commute only nearly: the lower half of the product counts."""
    r = symmetric(count, m)
    p, q = (z.astype(jnp.bfloat16) for z in (r @ r, r @ r @ r - 2 * r))
    p, q = (jnp.asarray(mirrored(z)) for z in (p, q))
    check(product(platform, p, q, out_dtype=jnp.float32), p, q)


@each_platform
def test_scaled_and_shifted(platform):
    x, addend = normal(2, 40, 70), symmetric(2, 40, seed=1)
    options = {"addend": addend, "scale": -2.0, "shift": 0.25}
    out = product(platform, x, x, out_dtype=jnp.float32, **options)
    check(out, x, x, scale=-2.0, addend=0.25 * np.asarray(addend, np.float64))
    # Rounded once, at the end, to the dtype of x if none is given.
    rounded = product(platform, x, x, **options)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, out.astype(jnp.bfloat16))


@each_platform
def test_float16_and_float32_operands(platform):
    x = normal(1, 20, 30, dtype=jnp.float16)
    addend = symmetric(1, 20, dtype=jnp.float32)
    out = product(platform, x, x, addend=addend, shift=1.0, out_dtype=addend.dtype)
    check(out, x, x, addend=addend)
    assert product(platform, x, x).dtype == jnp.float16


@pytest.mark.parametrize("on_diagonal", [True, False])
def test_tiles_that_threads_write_at_once_agree(on_diagonal):
    """On the diagonal the tile and its mirror are one place: a race if they differ."""
    tile = normal(8, 8)
    lower, upper = gpu._with_mirror(tile, jnp.array(on_diagonal))
    np.testing.assert_array_equal(lower, mirrored(tile) if on_diagonal else tile)
    np.testing.assert_array_equal(upper, lower.T)


@each_platform
@settings(max_examples=4, deadline=None)
@given(
    count=st.integers(1, 3),
    m=st.integers(1, 50),
    n=st.integers(1, 140),
    seed=st.integers(0, 99),
)
def test_any_shape(platform, count, m, n, seed):
    x, addend = normal(count, m, n, seed=seed), symmetric(count, m, seed=seed + 1)
    out = product(
        platform, x, x, addend=addend, scale=0.5, shift=1.0, out_dtype=jnp.float32
    )
    check(out, x, x, scale=0.5, addend=addend)


@settings(deadline=None)
@given(m=st.integers(1, 300), edge=st.integers(1, 64))
def test_lower_tiles_cover_the_lower_half_once(m, edge):
    covered = np.zeros((m, m), int)
    for row, column in zip(*lower_tiles(m, edge), strict=True):
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


def hopper_in_mind():
    """Where there is no GPU, JAX from 0.12 on asks for which one kernels are."""
    names = inspect.signature(jax.sharding.AbstractDevice).parameters
    facts = {"device_kind": "NVIDIA H200", "num_cores": None, "platform": "gpu"}
    device = jax.sharding.AbstractDevice(**{name: facts[name] for name in names})
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@each_platform
@pytest.mark.parametrize("shape", [(24, 768, 3072), (2, 1100, 7)])
@pytest.mark.parametrize("addend_dtype", [None, jnp.float32])
def test_lowers_without_the_hardware(platform, shape, addend_dtype):
    count, m, _ = shape
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    addend = addend_dtype and jax.ShapeDtypeStruct((count, m, m), addend_dtype)

    @jax.jit
    def f(x, addend):
        return MODULES[platform].symmetric_product(x, x, addend=addend, shift=2.0)

    target, call = {
        "tpu": ("tpu", "tpu_custom_call"),
        "gpu": ("cuda", "triton"),
    }[platform]
    with hopper_in_mind():
        lowered = f.trace(x, addend).lower(lowering_platforms=(target,))
    assert call in lowered.as_text()


@each_platform
@pytest.mark.parametrize("shape", [(2, 8, 5), (1, 8, 4), (8, 5)])
def test_wants_two_stacks_of_one_shape(platform, shape):
    with pytest.raises(ValueError, match="two stacks"):
        product(platform, normal(1, 8, 5), normal(*shape))


@each_platform
def test_wants_one_dtype(platform):
    with pytest.raises(ValueError, match="two stacks"):
        product(platform, normal(1, 8, 5), normal(1, 8, 5, dtype=jnp.float32))


@pytest.mark.parametrize("shape", [(3, 70, 300), (1, 50, 128)])
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
        tile=TILES["tpu"],
        interpret=simulator,
    )
    check(out, x, x, addend=addend)


def orthogonalized(solver, x):
    prepared = Solver.prepare.__wrapped__(solver, x)
    return Solver.iterate.__wrapped__(solver, prepared)


@pytest.mark.parametrize("shape", [(40, 40), (2, 24, 80)])
@pytest.mark.parametrize("platform, dtype", [("tpu", "bfloat16"), ("gpu", "float16")])
def test_the_iteration_by_kernels_is_that_by_xla(monkeypatch, platform, dtype, shape):
    interpreted = functools.partial(
        MODULES[platform].symmetric_product, tile=TILES[platform], interpret=True
    )
    monkeypatch.setattr(MODULES[platform], "symmetric_product", interpreted)
    monkeypatch.setitem(platforms.KERNEL_ROWS, platform, 16)
    x = normal(*shape, dtype=jnp.float32)
    exact = np.asarray(mc.newton_schulz(x, method="standard"), np.float64)
    errors = []
    for kernel in ("xla", "pallas"):
        solver = make_solver("keller", 5, "auto", dtype, "frobenius", kernel)
        y = jax.jit(orthogonalized)(solver.on(platform), x)
        errors.append(np.linalg.norm(y - exact) / np.linalg.norm(exact))
    assert 0 < errors[1] < 2 * errors[0] < 0.2


@pytest.mark.parametrize(
    "platform, call", [("tpu", "tpu_custom_call"), ("cuda", "triton")]
)
def test_an_update_by_kernels_lowers_without_hardware(platform, call):
    params = {"w": jax.ShapeDtypeStruct((2048, 4096), jnp.float32)}
    tx = mc.muon(1e-3, ns_kernel="pallas")
    state = jax.eval_shape(tx.init, params)
    with hopper_in_mind():
        traced = jax.jit(tx.update).trace(params, state, params)
        lowered = traced.lower(lowering_platforms=(platform,))
    assert call in lowered.as_text()

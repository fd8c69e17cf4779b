"""The Hopper kernel, interpreted, against numpy; and the order of tiles."""

import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from candidates import hopper
from candidates.on_hopper import OnHopper
from helpers import matrix_of, more, polynomial_of
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

import muonclip_jax as mc


SMALL = dict(tile=32, block=(16, 16), depth=32, steps=2, sms=3)


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    """Not once for each thread of each block, which takes most of the time."""
    lock, compiled = threading.Lock(), {}

    def run(jaxpr, consts, *args):
        with lock:
            if jaxpr not in compiled:
                body = functools.partial(jax.core.eval_jaxpr, jaxpr)
                compiled[jaxpr] = jax.jit(body).lower(consts, *args).compile()
        compiled[jaxpr](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)
    reset_gpu_interpret_mode_state()


def normal(seed: int, *shape: int, dtype="float16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def interpreted(x, y, **kwargs) -> np.ndarray:
    out = hopper.symmetric_product(
        x, y, interpret=InterpretGPUParams(), **(SMALL | kwargs)
    )
    assert out.dtype == x.dtype
    return np.float64(out)


def check(out, x, y, addend=None, scale=1.0, shift=0.0) -> None:
    """Within rounding once, of the lower half, and symmetric to the bit.

    Memory is NaN until it is written, so that this also shows that all of it is.
    """
    eps = float(jnp.finfo(x.dtype).eps)
    x, y = np.float64(x), np.float64(y)
    scale, shift = (np.reshape(np.float64(z), (-1, 1, 1)) for z in (scale, shift))
    addend = 0.0 if addend is None else np.float64(addend)
    exact = scale * (x @ y.mT) + shift * addend
    terms = abs(scale) * (abs(x) @ abs(y).mT) + abs(shift * addend)
    allowed = 0.51 * eps * abs(exact) + (x.shape[-1] + 3) * 2.0**-24 * terms
    lower = np.tril(np.ones_like(exact)) > 0
    assert np.isfinite(out).all()
    assert (abs(out - exact) <= allowed)[lower].all()
    np.testing.assert_array_equal(out, out.mT)


@pytest.mark.parametrize("dtype", [more("float16"), "bfloat16"])
def test_gram(dtype):
    x = normal(0, 2, 96, 128, dtype=dtype)
    check(interpreted(x, x), x, x)


@pytest.mark.parametrize("dtype", ["float16", more("bfloat16")])
def test_addend_with_factors_of_each_matrix(dtype):
    x = normal(0, 3, 64, 64, dtype=dtype)
    addend = normal(1, 3, 64, 64, dtype=dtype)
    addend += addend.mT
    scale, shift = normal(2, 3, dtype="float32"), normal(3, 3, dtype="float32")
    out = interpreted(x, x, addend=addend, scale=scale, shift=shift)
    check(out, x, x, addend, scale, shift)


def test_addend_with_numbers():
    x, addend = normal(0, 2, 96, 32), normal(1, 2, 96, 96)
    addend += addend.mT
    check(interpreted(x, x, addend=addend, scale=-2, shift=0.3), x, x, addend, -2, 0.3)


def test_commuting_factors():
    # Symmetric circulant matrices commute, and sums of small integers are exact.
    index = abs(np.arange(64)[:, None] - np.arange(64))
    first = np.random.default_rng(0).integers(-3, 4, (2, 33))
    x, y = (jnp.float16(z[np.minimum(index, 64 - index)])[None] for z in first)
    out = interpreted(x, y)
    np.testing.assert_array_equal(out, np.float64(x) @ np.float64(y).mT)


def test_lower_half_counts():
    x, y = normal(0, 2, 96, 64), normal(1, 2, 96, 64)
    check(interpreted(x, y), x, y)


@pytest.mark.parametrize(
    ("m", "n"), [more(8, 8), (40, 72), more(72, 40), more(104, 64)]
)
def test_ragged(m, n):
    x, addend = normal(0, 2, m, n), normal(1, 2, m, m)
    addend += addend.mT
    shift = normal(2, 2, dtype="float32")
    out = interpreted(x, x, addend=addend, scale=2.0, shift=shift)
    check(out, x, x, addend, 2.0, shift)


@pytest.mark.parametrize("addend", [False, True])
def test_blocks_twice_as_high_as_wide(addend):
    x, y, z = normal(0, 2, 96, 32), normal(1, 2, 96, 32), normal(1, 2, 96, 96)
    if addend:
        out = interpreted(x, y, addend=z + z.mT, shift=0.5, block=(32, 16))
        check(out, x, y, z + z.mT, shift=0.5)
    else:
        check(interpreted(x, y, block=(32, 16), buffers=2), x, y)


@pytest.mark.parametrize(("sms", "steps"), [(1, 3), (132, 1)])
def test_more_and_fewer_blocks_than_units(sms, steps):
    x = normal(0, 1, 96, 128)
    check(interpreted(x, x, sms=sms, steps=steps), x, x)


def test_jit():
    x = normal(0, 1, 64, 64)
    out = jax.jit(lambda x, s: interpreted_array(x, s))(x, jnp.float32(2))
    check(np.float64(out), x, x, scale=2.0)


def interpreted_array(x, scale):
    return hopper.symmetric_product(
        x, x, scale=scale, interpret=InterpretGPUParams(), **SMALL
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("m", [8, 128, 136, 640, 2048, 5000])
def test_each_tile_on_and_below_the_diagonal_is_computed_once(count, m):
    triangles = hopper.Triangles(count, m, 128)
    tiles = [
        (matrix, row, j)
        for matrix, row, column in triangles.units.tolist()
        for j in (column, column + 1)
        if j <= row
    ]
    edge = -(-m // 128)
    expected = {
        (b, i, j) for b in range(count) for i in range(edge) for j in range(i + 1)
    }
    assert len(tiles) == len(expected) and set(tiles) == expected
    assert np.isclose(triangles.computed, len(tiles) / count * 128**2 / m**2)


def test_half_the_arithmetic_and_half_units_at_the_end():
    triangles = hopper.Triangles(4, 2048, 128)
    assert triangles.computed == 136 / 256
    alone = triangles.units[:, 1] == triangles.units[:, 2]
    assert (np.diff(alone.astype(int)) >= 0).all() and alone.sum() == 4 * 8


def test_refuses():
    x = jnp.zeros((1, 64, 64), "float16")
    with pytest.raises(ValueError, match=r"multiples of 8, not 60 x 64"):
        hopper.symmetric_product(x[:, :60], x[:, :60])
    with pytest.raises(ValueError, match=r"float32\[1, 64, 64\]"):
        hopper.symmetric_product(x.astype("float32"), x.astype("float32"))
    with pytest.raises(ValueError, match="one shape"):
        hopper.symmetric_product(x, x[:, :32])
    with pytest.raises(ValueError, match="addend"):
        hopper.symmetric_product(x, x, addend=x[:, :32])
    with pytest.raises(ValueError, match="not 128 x 32 of 128"):
        hopper.symmetric_product(x, x, block=(128, 32))


@pytest.mark.parametrize(
    "values",
    [
        more(np.ones(32)),
        pytest.param(1 / np.arange(1, 33), marks=pytest.mark.more),
        pytest.param(np.geomspace(1, 1e-4, 32), marks=pytest.mark.slow),
        pytest.param(np.geomspace(1, 1e-8, 32), marks=pytest.mark.slow),
        pytest.param(np.ones(1), marks=pytest.mark.slow),
        pytest.param(np.ones(10), marks=pytest.mark.slow),
    ],
    ids=["even", "power law", "condition 1e4", "condition 1e8", "rank 1", "rank 10"],
)
def test_the_iteration_by_kernels_is_as_exact_as_the_other_forms(values):
    """Within twice the error of the standard form in bfloat16, as all of them are."""
    x = matrix_of(values, 32, 96)
    exact = polynomial_of(x, mc.NS_COEFFS["keller"])
    small = dict(tile=16, block=(16, 16), depth=32, steps=2, sms=2)
    settings = tuple((small | {"interpret": InterpretGPUParams()}).items())
    by_kernel = OnHopper(settings=settings)
    tx = mc.scale_by_muon(orthogonalizer=by_kernel, consistent_rms=None, nesterov=False)
    updates, _ = tx.update({"w": jnp.float32(x)}, tx.init({"w": jnp.float32(x)}))
    y = updates["w"] / np.sqrt(3)
    short = mc.newton_schulz(jnp.float32(x), method="standard", dtype="bfloat16")
    bound = np.linalg.norm(np.float64(short) - exact)
    assert 0 < np.linalg.norm(np.float64(y) - exact) < 2 * bound


@pytest.mark.more
def test_an_update_by_kernels_lowers_without_hardware():
    params = {"w": jax.ShapeDtypeStruct((2048, 4096), jnp.float32)}
    tx = mc.muon(1e-3, orthogonalizer=OnHopper())
    state = jax.eval_shape(tx.init, params)
    with hopper_in_mind():
        traced = jax.jit(tx.update).trace(params, state, params)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def hopper_in_mind():
    """Where there is no GPU, JAX from 0.12 on asks for which one kernels are."""
    names = inspect.signature(jax.sharding.AbstractDevice).parameters
    facts = {"device_kind": "NVIDIA H200", "num_cores": None, "platform": "gpu"}
    device = jax.sharding.AbstractDevice(**{name: facts[name] for name in names})
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)

"""What TPUs do, here on CPU: tall matrices as they are, batches of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    matrix_of,
    more,
    of_newton_schulz,
    one_at_a_time,
    polynomial_of,
)
from internals import (
    matrix_view,
    MatrixLeaf,
    on_one_device,
    platform_named,
    platform_with,
    solver,
)
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


KELLER = mc.NS_COEFFS["keller"]
PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def matrices(count, m, n, seed=0):
    values = np.linspace(1, 0.3, min(m, n))
    return np.stack([matrix_of(values * (i + 1), m, n, seed + i) for i in range(count)])


def exact(stack):
    return np.stack([polynomial_of(x, KELLER) for x in stack])


@pytest.mark.parametrize(
    "kind, method, platform",
    one_at_a_time(
        ["frobenius", "aol", "equilibrated"], ["standard", "gram"], ["cpu", "tpu"]
    ),
)
def test_tall_matrices_are_wide_ones_turned(platform, method, kind):
    """In one block and, as on CPU, in two."""
    wide = jnp.float32(matrices(2, 12, 30))
    with platform_with(platform, block_rows=4 if platform == "cpu" else np.inf):
        its = solver(platform, method=method, dtype="float32", preconditioning=kind)
        expected, result = its.orthogonalize(wide), its.orthogonalize(wide.mT)
    assert_close(result.mT, expected, of_newton_schulz(30))
    if kind == "frobenius":
        assert_close(result.mT, exact(wide), of_newton_schulz(30))


@pytest.mark.parametrize("platform", [more("gpu"), "tpu"])
@pytest.mark.parametrize("batch", [1, more(60), 130, more(10**6)])
def test_leaves_on_one_accelerator(platform, batch):
    """Prepared one by one and in loops; of several shapes and dtypes."""
    shapes = [(4, 6), (6, 4), (5, 4, 6), (6, 4), (4, 6), (3, 6, 4), (5, 5), (4, 6)]
    dtypes = ["float32"] * 7 + ["bfloat16"]
    leaves = [
        jnp.asarray(matrices(*(1, *shape)[-3:], seed=i).reshape(shape), dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    given = [MatrixLeaf(leaf, matrix_view(leaf.shape, PLAIN)) for leaf in leaves]
    with platform_with(platform, batch_entries=batch, stack_entries=batch / 2):
        its = solver(platform, dtype="float32")
        results = jax.jit(lambda leaves: on_one_device(its, leaves))(given)
    for leaf, result in zip(leaves, results, strict=True):
        assert result.dtype == jnp.float32
        stack = np.float64(leaf).reshape(-1, *leaf.shape[-2:])
        assert_close(result.reshape(stack.shape), exact(stack), of_newton_schulz(6))


def sizes_of_stacks(shapes, size):
    """How many matrices of `size` an orthogonalizer is given at once, anywhere.

    Programs are traced for every platform, and nothing is computed.
    """
    seen = set()

    def orthogonalizer(stack):
        seen.add(stack.shape)
        return stack

    tx = mc.scale_by_muon(dimension_numbers=PLAIN, orthogonalizer=orthogonalizer)
    params = {
        f"w{i}": jax.ShapeDtypeStruct((*shape, *size), "float32")
        for i, shape in enumerate(shapes)
    }
    jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    assert {shape[1:] for shape in seen} == {size}
    return {len_of for len_of, *_ in seen}


def test_batches_are_as_even_as_they_can_be():
    """Nine matrices, of which eight fit, are two times five: not eight, and eight."""
    size = (32, 64)
    assert platform_named("cpu").batch_entries // (32 * 64) == 8
    assert sizes_of_stacks([(9,)], size) == {5, 9}
    assert sizes_of_stacks([(16,)], size) == {8, 16}


def test_leaves_are_put_together_up_to_a_limit():
    """One TPU stacks five of eight leaves, then three; a GPU all, a CPU none."""
    size = (1024, 1024)
    fit = {x: platform_named(x).stack_entries // 2**20 for x in ("tpu", "gpu")}
    assert fit["tpu"] == 5 and fit["gpu"] > 8
    assert sizes_of_stacks([()] * 8, size) == {1, 5, 3, 8}
    # A leaf is not taken apart, however large it is.
    assert sizes_of_stacks([(7,), (), ()], size) == {1, 7, 2, 9}

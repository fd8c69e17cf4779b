"""Each platform's batches on meshes, here on CPU: the same matrices, in fewer bytes."""

import functools

import jax
import numpy as np
import pytest
from helpers import few, matrix_of, more, polynomial_of
from internals import (
    matrix_view,
    MatrixLeaf,
    orthogonalize_on_mesh,
    platform_with,
    solver,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
MESH = {"expert": 2, "fsdp": 4}

# Shapes and specs of leaves.
LAYOUTS = {
    "as many for all": [((2, 4, 24, 8), P(None, "expert", "fsdp")),
         ((2, 4, 8, 24), P(None, "expert", "fsdp"))],
    "more for some": [((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((9, 2, 8, 24), P(None, "expert", "fsdp")),
         ((40, 8), P("fsdp")), ((8, 8), P(None, "expert"))],
    "few": [((3, 24, 8), P(None, ("expert", "fsdp"))),
         ((2, 8, 24), P(None, ("expert", "fsdp")))],
    "some more for some": [((11, 2, 24, 8), P(None, "expert", "fsdp")),
         ((13, 2, 24, 8), P(None, "expert", "fsdp")),
         ((21, 2, 8, 24), P(None, "expert", "fsdp"))],
    "copies": [((3, 24, 8), P(None, "fsdp")), ((2, 8, 24), P(None, "fsdp"))],
    "whole": [((11, 24, 8), P()), ((5, 24, 8), P())],
}  # fmt: skip


def leaf_of(shape, seed):
    *stack, m, n = shape
    values = np.linspace(1, 0.3, min(m, n))
    each = [matrix_of(values, m, n, seed + i) for i in range(int(np.prod(stack)))]
    return np.stack(each).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("platform", [more("cpu"), more("gpu"), "tpu"])
@pytest.mark.parametrize("batch", [more(1), 400, more(10**6)])
@pytest.mark.parametrize("name", few(LAYOUTS, "some more for some"))
def test_matrices_come_back_orthogonal(name, batch, platform):
    layout = LAYOUTS[name]
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 4),
        tuple(MESH),
        axis_types=(AxisType.Auto,) * 2,
    )
    leaves = [
        jax.device_put(leaf_of(shape, 10 * i), NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(layout)
    ]
    with platform_with(platform, batch_entries=batch):
        route = functools.partial(
            orthogonalize_on_mesh, solver(platform, dtype="float32"), mesh=mesh
        )
        results = jax.jit(route)(
            [
                MatrixLeaf(leaf, matrix_view(shape, PLAIN), spec)
                for leaf, (shape, spec) in zip(leaves, layout, strict=True)
            ]
        )
    for leaf, result in zip(leaves, results, strict=True):
        assert result.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        matrices = np.float64(leaf).reshape(-1, *leaf.shape[-2:])
        exact = [polynomial_of(x, mc.NS_COEFFS["keller"]) for x in matrices]
        actual = np.asarray(result).reshape(matrices.shape)
        np.testing.assert_allclose(actual, np.stack(exact), atol=5e-5)

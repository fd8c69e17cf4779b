"""What meshes of TPUs do, here on CPU: layouts apart, tall matrices, loops in turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import matrix_of, polynomial_of
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc
from muonclip_jax._matrices.view import matrix_view
from muonclip_jax._mesh.on_mesh import orthogonalize_on_mesh
from muonclip_jax._mesh.shared_stacks import plan_exchanges
from muonclip_jax._newton_schulz import platforms
from muonclip_jax._newton_schulz.solver import make_solver


PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
SOLVER = make_solver("keller", 5, "auto", jnp.float32, "frobenius", "xla").on("tpu")
MESH = {"expert": 2, "fsdp": 4}

# Shapes and specs of leaves, and how many stacks they make.
LAYOUTS = {
    "as many for all": (
        [((2, 4, 24, 8), P(None, "expert", "fsdp")),
         ((2, 4, 8, 24), P(None, "expert", "fsdp"))],
        2,
    ),
    "more for some": (
        [((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((9, 2, 8, 24), P(None, "expert", "fsdp")),
         ((40, 8), P("fsdp")), ((8, 8), P(None, "expert"))],
        4,
    ),
    "few": (
        [((3, 24, 8), P(None, ("expert", "fsdp"))),
         ((2, 8, 24), P(None, ("expert", "fsdp")))],
        1,
    ),
    "whole": ([((11, 24, 8), P()), ((5, 24, 8), P())], 1),
}  # fmt: skip


def plan(leaves):
    shapes = [shape for shape, _ in leaves]
    views = [matrix_view(shape, PLAIN) for shape in shapes]
    dtypes = [jnp.dtype("float32")] * len(leaves)
    return plan_exchanges(SOLVER, dtypes, views, [spec for _, spec in leaves], MESH)


def leaf_of(shape, seed):
    *stack, m, n = shape
    values = np.linspace(1, 0.3, min(m, n))
    each = [matrix_of(values, m, n, seed + i) for i in range(int(np.prod(stack)))]
    return np.stack(each).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("batch", [1, 400, 10**6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices_come_back_orthogonal(monkeypatch, name, batch):
    monkeypatch.setitem(platforms.BATCH_ENTRIES, "tpu", batch)
    layout, stacks = LAYOUTS[name]
    assert len(plan(layout)) == stacks
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 4),
        tuple(MESH),
        axis_types=(AxisType.Auto,) * 2,
    )
    leaves = [
        jax.device_put(leaf_of(shape, 10 * i), NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(layout)
    ]
    on_mesh = functools.partial(
        orthogonalize_on_mesh,
        views=[matrix_view(shape, PLAIN) for shape, _ in layout],
        mesh=mesh,
        specs=[spec for _, spec in layout],
    )
    for leaf, result in zip(leaves, jax.jit(on_mesh)(SOLVER, leaves), strict=True):
        assert result.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        matrices = np.float64(leaf).reshape(-1, *leaf.shape[-2:])
        exact = [polynomial_of(x, mc.NS_COEFFS["keller"]) for x in matrices]
        actual = np.asarray(result).reshape(matrices.shape)
        np.testing.assert_allclose(actual, np.stack(exact), atol=5e-5)


def test_layouts_have_stacks_of_their_own_where_that_pads_nothing():
    """Tall matrices are then as they lie."""
    shapes = [
        (each.stack.shape, each.stack.count, len(each.exchange.layouts))
        for each in plan(LAYOUTS["more for some"][0])
    ]
    assert shapes == [
        ((24, 8), 16, 1),
        ((8, 24), 9, 1),
        ((40, 8), 1, 1),
        ((8, 8), 1, 1),
    ]
    (few,) = plan(LAYOUTS["few"][0])
    assert few.stack.shape == (8, 24) and len(few.exchange.layouts) == 2

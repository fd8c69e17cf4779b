"""What meshes of TPUs do, here on CPU: layouts apart, tall matrices, loops in turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few, matrix_of, more, polynomial_of
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from ragged import ragged_all_to_all

import muonclip_jax as mc
from muonclip_jax._matrices.view import matrix_view
from muonclip_jax._mesh import on_mesh
from muonclip_jax._mesh.ragged_exchange import RaggedExchange
from muonclip_jax._mesh.shared_stacks import plan_exchanges
from muonclip_jax._newton_schulz import platforms
from muonclip_jax._newton_schulz.make_solver import make_solver


PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
SOLVER = make_solver("keller", 5, "auto", jnp.float32, "frobenius", "xla").on("tpu")
MESH = {"expert": 2, "fsdp": 4}

# Shapes and specs of leaves, and how many stacks they make: where messages are ragged,
# and where all are of one size.
LAYOUTS = {
    "as many for all": (
        [((2, 4, 24, 8), P(None, "expert", "fsdp")),
         ((2, 4, 8, 24), P(None, "expert", "fsdp"))],
        2, 2,
    ),
    "more for some": (
        [((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((8, 2, 24, 8), P(None, "expert", "fsdp")),
         ((9, 2, 8, 24), P(None, "expert", "fsdp")),
         ((40, 8), P("fsdp")), ((8, 8), P(None, "expert"))],
        4, 4,
    ),
    "few": (
        [((3, 24, 8), P(None, ("expert", "fsdp"))),
         ((2, 8, 24), P(None, ("expert", "fsdp")))],
        2, 1,
    ),
    "rounds, and some more for some": (
        [((11, 2, 24, 8), P(None, "expert", "fsdp")),
         ((13, 2, 24, 8), P(None, "expert", "fsdp")),
         ((21, 2, 8, 24), P(None, "expert", "fsdp"))],
        2, 2,
    ),
    "copies": (
        [((3, 24, 8), P(None, "fsdp")), ((2, 8, 24), P(None, "fsdp"))],
        1, 1,
    ),
    "whole": ([((11, 24, 8), P()), ((5, 24, 8), P())], 1, 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)


def plan(leaves, ragged=True):
    shapes = [shape for shape, _ in leaves]
    views = [matrix_view(shape, PLAIN) for shape in shapes]
    dtypes = [jnp.dtype("float32")] * len(leaves)
    specs = [spec for _, spec in leaves]
    return plan_exchanges(SOLVER, dtypes, views, specs, MESH, ragged=ragged)


def leaf_of(shape, seed):
    *stack, m, n = shape
    values = np.linspace(1, 0.3, min(m, n))
    each = [matrix_of(values, m, n, seed + i) for i in range(int(np.prod(stack)))]
    return np.stack(each).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("ragged", [more(True), False])
@pytest.mark.parametrize("batch", [more(1), 400, more(10**6)])
@pytest.mark.parametrize("name", few(LAYOUTS, "more for some"))
def test_matrices_come_back_orthogonal(monkeypatch, name, batch, ragged):
    monkeypatch.setitem(platforms.BATCH_ENTRIES, "tpu", batch)
    layout, *stacks = LAYOUTS[name]
    assert len(plan(layout, ragged)) == stacks[not ragged]
    monkeypatch.setattr(on_mesh, "is_ragged", lambda mesh: ragged)
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 4),
        tuple(MESH),
        axis_types=(AxisType.Auto,) * 2,
    )
    leaves = [
        jax.device_put(leaf_of(shape, 10 * i), NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(layout)
    ]
    route = functools.partial(
        on_mesh.orthogonalize_on_mesh,
        views=[matrix_view(shape, PLAIN) for shape, _ in layout],
        mesh=mesh,
        specs=[spec for _, spec in layout],
    )
    for leaf, result in zip(leaves, jax.jit(route)(SOLVER, leaves), strict=True):
        assert result.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        matrices = np.float64(leaf).reshape(-1, *leaf.shape[-2:])
        exact = [polynomial_of(x, mc.NS_COEFFS["keller"]) for x in matrices]
        actual = np.asarray(result).reshape(matrices.shape)
        np.testing.assert_allclose(actual, np.stack(exact), atol=5e-5)


def test_layouts_have_stacks_of_their_own_where_that_pads_nothing():
    """Tall matrices are then as they lie."""
    shapes = [
        (each.stack.shape, each.stack.count, len(each.exchange.layouts))
        for each in plan(LAYOUTS["more for some"][0], ragged=False)
    ]
    assert shapes == [
        ((24, 8), 16, 1),
        ((8, 24), 9, 1),
        ((40, 8), 1, 1),
        ((8, 8), 1, 1),
    ]
    (few,) = plan(LAYOUTS["few"][0], ragged=False)
    assert few.stack.shape == (8, 24) and len(few.exchange.layouts) == 2


def test_layouts_have_stacks_of_their_own_where_messages_are_ragged():
    shapes = [(each.stack.shape, each.stack.count) for each in plan(LAYOUTS["few"][0])]
    assert shapes == [((24, 8), 3), ((8, 24), 2)]
    (copies,) = plan(LAYOUTS["copies"][0])
    assert copies.stack.shape == (8, 24) and len(copies.exchange.layouts) == 2


@pytest.mark.parametrize("count", [1, 40])
def test_few_matrices_of_many_devices_have_messages_of_their_own(count):
    dtypes, views = [jnp.dtype("float32")], [matrix_view((count, 32, 8), PLAIN)]
    specs, mesh = [P(None, "fsdp")], {"fsdp": 16}
    (shared,) = plan_exchanges(SOLVER, dtypes, views, specs, mesh, ragged=True)
    assert isinstance(shared.exchange, RaggedExchange)


@pytest.mark.parametrize(
    ("batch", "rounds", "slots"),
    [
        # Six, or five and a quarter, matrices for each device; two batches a round.
        (1, [(3, 1), (2, 1)], [[], [(4, 2)]]),
        (24 * 8, [(3, 1), (2, 1)], [[], [(4, 2)]]),
        (2 * 24 * 8, [(0, 2), (0, 2)], [[(0, 6)], [(0, 6)]]),
    ],
)
def test_what_all_own_is_iterated_in_rounds(monkeypatch, batch, rounds, slots):
    monkeypatch.setitem(platforms.BATCH_ENTRIES, "tpu", batch)
    shared = plan(LAYOUTS["rounds, and some more for some"][0])
    assert [each.rounds(SOLVER) for each in shared] == rounds
    assert [each.rest(SOLVER) for each in shared] == slots

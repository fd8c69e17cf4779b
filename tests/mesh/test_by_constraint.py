"""Without any shardings given: the same numbers, shared out by constraints."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few, normal
from hlo_costs import hlo_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    divide_stacks,
    matrix_view,
    on_one_device,
    orthogonalize_by_constraint,
    share_in_a_row,
    solver,
    stacks_of,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

# One stack with fewer matrices than devices, one with more, and one of experts.
SHAPES = {
    "query": (3, 16, 16),
    "out": (2, 16, 16),
    "up": (6, 16, 32),
    "down": (5, 32, 16),
    "experts": (3, 8, 8, 16),
}
LAYOUTS = {
    "fsdp": ({"fsdp": 8}, dict.fromkeys(SHAPES, P(None, "fsdp"))),
    "outputs": ({"fsdp": 8}, dict.fromkeys(SHAPES, P(None, None, "fsdp"))),
    "replicated": ({"data": 8}, dict.fromkeys(SHAPES, P())),
    "fsdp and tensor": (
        {"fsdp": 4, "one": 1, "tensor": 2},
        {
            "query": P(None, "fsdp", "tensor"),
            "out": P(None, "tensor", "fsdp"),
            "up": P(None, "fsdp", "tensor"),
            "down": P(None, "tensor", "fsdp"),
            "experts": P(None, None, "fsdp", "tensor"),
        },
    ),
    "three axes": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {
            "query": P(None, "fsdp", "tensor"),
            "out": P(None, "tensor", "fsdp"),
            "up": P(None, ("fsdp", "data"), "tensor"),
            "down": P(None, "tensor"),
            "experts": P(None, "tensor", "fsdp"),
        },
    ),
    "experts": (
        {"expert": 4, "fsdp": 2},
        {
            "query": P(None, ("expert", "fsdp")),
            "out": P(None, ("expert", "fsdp")),
            "up": P("fsdp"),
            "down": P(None, "expert", "fsdp"),
            "experts": P(None, "expert", "fsdp"),
        },
    ),
}
VIEWS = [matrix_view(shape, MuonDimensionNumbers(-2, -1)) for shape in SHAPES.values()]
SOLVER = solver("cpu", steps=2)


def make_mesh(axes, kind=AxisType.Auto):
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
    )


def random_leaves():
    # Of other scales, so that one taken for another is seen.
    return [normal(i, *shape, scale=10.0**i) for i, shape in enumerate(SHAPES.values())]


def placed(layout):
    axes, specs = LAYOUTS[layout]
    mesh = make_mesh(axes)
    shardings = [NamedSharding(mesh, spec) for spec in specs.values()]
    return mesh, jax.device_put(random_leaves(), shardings)


def route_on(mesh):
    return jax.jit(
        functools.partial(
            orthogonalize_by_constraint, SOLVER, views=VIEWS, mesh=mesh.abstract_mesh
        )
    )


@functools.cache
def alone():
    return on_one_device(SOLVER, random_leaves(), views=VIEWS)


@pytest.mark.more
@pytest.mark.parametrize("layout", few(LAYOUTS, "three axes"))
def test_same_as_on_one_device(layout):
    mesh, leaves = placed(layout)
    chex.assert_trees_all_close(route_on(mesh)(leaves), alone(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", few(LAYOUTS, "three axes", "experts"))
def test_devices_iterate_their_share_without_waiting_for_others(layout):
    mesh, leaves = placed(layout)
    plan = divide_stacks(SOLVER, stacks_of(leaves, VIEWS, mesh.size), mesh.size)
    once = {f"stack{i}": 1 for i in range(len(plan))}
    text = route_on(mesh).lower(leaves).compile().as_text()
    costs = hlo_costs(text, once)
    # One round of a loop takes all slots of a device, for matrices this small.
    expected = sum(
        2 * share.slots * SOLVER.cost(stack.shape, jnp.dtype("float32"))
        for stack, share in plan
    )
    assert costs.flops == expected
    assert costs.collectives
    assert all(traffic.in_loops == 0 for traffic in costs.collectives.values())


def lowered_for(platform, kind=AxisType.Auto, is_on_mesh=True):
    mesh = make_mesh({"fsdp": 8}, kind)
    params = {"w": np.ones((4, 16, 32), np.float32)}
    if is_on_mesh:
        params = jax.device_put(params, NamedSharding(mesh, P(None, "fsdp")))
    make = functools.partial(
        mc.scale_by_muon, dimension_numbers={"w": MuonDimensionNumbers(-2, -1)}
    )
    # Another's state: its own would tell how the parameters are sharded.
    traced = jax.jit(make().update).trace(params, make().init(params))
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_taken_where_nobody_says_how_leaves_are_sharded(platform):
    text = lowered_for(platform)
    assert text.count("sdy.manual_computation") == 1
    assert "all_to_all" not in text and "CustomSPMDPartitioning" not in text


def test_taken_on_the_mesh_that_is_set():
    with jax.set_mesh(make_mesh({"fsdp": 8})):
        text = lowered_for("tpu", is_on_mesh=False)
    assert text.count("sdy.manual_computation") == 1
    assert "manual_computation" not in lowered_for("tpu", is_on_mesh=False)


def test_not_taken_with_explicit_axes():
    assert "all_to_all" in lowered_for("tpu", AxisType.Explicit)


def loads_of(counts, costs, devices):
    shares = share_in_a_row(counts, costs, devices)
    return sum(
        cost * share.counts for cost, share in zip(costs, shares, strict=True)
    ), shares


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(1, 1000)), min_size=1, max_size=5),
    st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_slots_hold_all_matrices_in_order(stacks, devices):
    counts, costs = zip(*stacks, strict=True)
    for count, share in zip(counts, loads_of(counts, costs, devices)[1], strict=True):
        before, after = share.padding
        filled = np.pad(np.ones(count, int), (before, after))
        by_device = filled.reshape(devices, share.slots)
        np.testing.assert_array_equal(by_device.sum(axis=1), share.counts)
        # A device iterates its first slots.
        assert (np.diff(by_device, axis=1) <= 0).all()


def test_devices_without_a_large_matrix_take_the_small_ones():
    """Llama-1B on 64 devices: 48 large matrices, and 32 and 32 smaller ones."""
    loads, (squares, large, small) = loads_of([32, 48, 32], [258.0, 601.0, 9.0], 64)
    assert loads.max() == 601
    assert large.counts.max() == 1 and squares.counts.max() == 2
    assert not (large.counts * (squares.counts + small.counts)).any()


def test_leaves_of_many_matrices_have_stacks_of_their_own():
    """As the experts of a model whose dense layers have matrices of the same shape."""
    shapes = (3, 8, 16), (2, 8, 16), (32, 8, 16), (2, 16, 8), (4, 8, 8, 16)
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    views = [matrix_view(shape, MuonDimensionNumbers(-2, -1)) for shape in shapes]

    def together(devices):
        stacks = stacks_of(leaves, views, devices)
        return [[part.leaf for part in stack.parts] for stack in stacks]

    assert together(8) == [[0, 1], [3], [2], [4]]
    assert together(9) == [[0, 1, 2, 4], [3]]

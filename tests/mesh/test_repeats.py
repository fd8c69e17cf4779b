"""What replicas repeat instead of sharing it: as told, and between slices of TPUs."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few, more, normal
from hlo_costs import hlo_costs
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc
from muonclip_jax._matrices.view import matrix_view
from muonclip_jax._mesh.by_constraint import orthogonalize_by_constraint
from muonclip_jax._mesh.layouts import Layouts
from muonclip_jax._mesh.network import FLOPS_PER_BYTE, Network, network_of
from muonclip_jax._mesh.placement import Placement
from muonclip_jax._mesh.shared_stacks import plan_exchanges
from muonclip_jax._muon.one_device import orthogonalize_on_one_device
from muonclip_jax._newton_schulz.make_solver import make_solver


pytestmark = pytest.mark.usefixtures("fast_compilation")

PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
SHAPES = {"up": (6, 16, 64), "down": (5, 64, 16), "query": (3, 16, 16)}
NUMBERS = dict.fromkeys(SHAPES, PLAIN)
LAYOUTS = {
    "fsdp in each slice": (
        {"slice": 2, "fsdp": 4},
        dict.fromkeys(SHAPES, P(None, "fsdp")),
    ),
    "slices behind": ({"fsdp": 4, "slice": 2}, dict.fromkeys(SHAPES, P(None, "fsdp"))),
    "copies in each slice": ({"slice": 2, "data": 4}, dict.fromkeys(SHAPES, P())),
    "one cut by slices": (
        {"slice": 2, "fsdp": 4},
        {"up": P(None, "fsdp"), "down": P(None, ("slice", "fsdp")), "query": P()},
    ),
    "layers by slices": (
        {"slice": 2, "fsdp": 2, "data": 2},
        {"up": P("slice", "fsdp"), "down": P(None, "fsdp"), "query": P(None, "fsdp")},
    ),
}

make = functools.partial(mc.scale_by_muon, dimension_numbers=NUMBERS, ns_steps=2)


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a device as a mesh wants."""

    id: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    process_index: int = 0
    num_cores: int = 1


def mesh_of_chips(
    slice_of, platform="tpu", shape=(2, 4), names=("a", "b"), kind="TPU v5"
):
    count = int(np.prod(shape))
    chips = [Chip(i, slice_of(i), platform, kind) for i in range(count)]
    return Mesh(np.array(chips).reshape(shape), names)


def random_tree(seed):
    scales = [1, 30, 1e-3]
    return {
        name: np.asarray(normal(seed + i, *shape, scale=scale))
        for i, (scale, (name, shape)) in enumerate(
            zip(scales, SHAPES.items(), strict=True)
        )
    }


def placed(layout):
    axes, specs = LAYOUTS[layout]
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return shardings, jax.device_put(random_tree(1), shardings)


def program_of(layout, **arguments):
    shardings, gradients = placed(layout)
    tx = make(shardings=shardings, **arguments)
    return jax.jit(tx.update).lower(gradients, tx.init(gradients)).compile()


@pytest.mark.parametrize("layout", few(LAYOUTS, "layers by slices"))
def test_the_update_of_one_device(layout):
    shardings, gradients = placed(layout)
    tx, plain = make(shardings=shardings, repeat_axes="slice"), make()
    updates, _ = jax.jit(tx.update)(gradients, tx.init(gradients))
    expected, _ = plain.update(random_tree(1), plain.init(random_tree(0)))
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
    for name, sharding in shardings.items():
        assert updates[name].sharding.is_equivalent_to(sharding, updates[name].ndim)


@pytest.mark.parametrize("layout", [more("fsdp in each slice"), "slices behind"])
def test_nothing_travels_between_slices(layout):
    """Two exchanges a stack either way; results return to the other slice in one."""
    kinds = {
        given: {
            kind: traffic.count
            for kind, traffic in hlo_costs(
                program_of(layout, repeat_axes=given).as_text(),
                dict.fromkeys(("stack0", "stack1"), 1),
            ).collectives.items()
        }
        for given in ("slice", ())
    }
    assert kinds["slice"] == {"all-to-all": 4}
    assert kinds[()] == {"all-to-all": 4, "all-gather": 2}
    shardings, gradients = placed(layout)
    tx = make(shardings=shardings, repeat_axes="slice")
    program = str(jax.make_jaxpr(tx.update)(gradients, tx.init(gradients)))
    along = set(re.findall(r"all_to_all\[[^]]*?axis_name=(\(.*?\))", program))
    assert along == {"('fsdp',)"}


def test_slices_are_found_by_their_devices():
    def axes_of(*mesh, **settings):
        return network_of(mesh_of_chips(*mesh, **settings)).axes

    assert axes_of(lambda i: i // 4) == ("a",)
    assert axes_of(lambda i: i % 2) == ("b",)
    assert axes_of(lambda i: i // 2) == ("a", "b")
    assert axes_of(lambda i: 0) == ()
    assert axes_of(lambda i: i // 4, platform="gpu") == ()


def plan_for(shapes, network, mesh):
    solver = make_solver("keller", 5, "auto", None, "frobenius", "xla").on("tpu")
    views = [matrix_view(shape, PLAIN) for shape in shapes]
    dtypes = [jnp.dtype("float32")] * len(shapes)
    specs = [P(None, "fsdp")] * len(shapes)
    shared = plan_exchanges(solver, dtypes, views, specs, mesh, network)
    return {each.stack.shape: each.exchange.roles.replicated for each in shared}


def test_arithmetic_decides_between_slices():
    """Five steps on m x m take 30 m^3 operations, and the result has 2 m^2 bytes."""
    break_even = FLOPS_PER_BYTE / 15
    assert break_even == pytest.approx(4896)
    small, large = 64 * int(break_even / 64), 64 * (1 + int(break_even / 64))
    mesh, network = {"slice": 2, "fsdp": 4}, Network(("slice",), FLOPS_PER_BYTE)
    shapes = [(8, small, small), (8, large, large), (8, 1024, 8192)]
    assert plan_for(shapes, network, mesh) == {
        (small, small): (),
        (large, large): ("slice",),
        (1024, 8192): (),
    }
    # As many copies in a slice, which share its work: each receives all results.
    copies = {"slice": 2, "data": 2, "fsdp": 2}
    assert plan_for([(8, large, large)], network, copies) == {(large, large): ("data",)}


def test_what_no_sharing_would_hasten_is_repeated():
    """Four matrices on four devices of each slice: the busiest has one in any case."""
    mesh, network = {"slice": 2, "fsdp": 4}, Network(("slice",), FLOPS_PER_BYTE)
    assert plan_for([(8, 8192, 8192)], network, mesh) == {(8192, 8192): ("slice",)}
    assert plan_for([(4, 8192, 8192)], network, mesh) == {(8192, 8192): ()}


def test_slices_once_seen_are_known_to_a_traced_program():
    mesh, layouts = mesh_of_chips(lambda i: i // 4), Layouts(None)
    abstract = Placement(mesh.abstract_mesh, ())
    assert layouts.network(abstract) == Network()
    assert layouts.network(None) == Network()
    found = layouts.network(Placement(mesh, ()))
    assert found.axes == ("a",)
    assert layouts.network(abstract) == found
    told = Layouts(None, ()).network(Placement(mesh, ()))
    assert told == found._replace(axes=(), below=math.inf)


def test_messages_are_ragged_where_the_compiler_has_them():
    """It refuses them on v5e, and there are none on other platforms."""
    kinds = {"TPU v4": True, "TPU v5": True, "TPU v6 lite": True, "TPU7x": True}
    kinds |= {"TPU v5 lite": False, "TPU v3": False, "cpu": False, "NVIDIA H200": False}
    for kind, is_ragged in kinds.items():
        mesh = mesh_of_chips(lambda i: 0, kind=kind)
        assert network_of(mesh).is_ragged == is_ragged
        plan = plan_for([(8, 64, 64)], network_of(mesh), {"slice": 1, "fsdp": 8})
        assert plan == {(64, 64): ()}


def test_where_nobody_says_how_leaves_lie():
    _, gradients = placed("fsdp in each slice")
    leaves = [gradients[name] for name in SHAPES]
    mesh = leaves[0].sharding.mesh
    views = [matrix_view(shape, PLAIN) for shape in SHAPES.values()]
    solver = make_solver("keller", 2, "auto", None, "frobenius", "xla").on("cpu")
    expected = orthogonalize_on_one_device(
        solver, list(random_tree(1).values()), views=views
    )
    flops = []
    for network in (Network(), Network(("slice",)), Network(("slice",), 1.0)):
        route = functools.partial(
            orthogonalize_by_constraint, views=views, mesh=mesh, network=network
        )
        compiled = jax.jit(route).lower(solver, leaves).compile()
        chex.assert_trees_all_close(
            compiled(solver, leaves), expected, rtol=1e-5, atol=1e-6
        )
        trips = {f"stack{i}": 1 for i in range(len(SHAPES))}
        flops.append(hlo_costs(compiled.as_text(), trips).flops)
    assert flops[1] > 1.4 * flops[0] and flops[2] == flops[0]


def test_axes_that_cannot_be():
    shardings, gradients = placed("fsdp in each slice")
    tx = make(shardings=shardings, repeat_axes=("slice", "dcn"))
    with pytest.raises(
        ValueError, match=r"repeat_axes names axes .* \['dcn'\]; .*fsdp"
    ):
        tx.init(gradients)
    with pytest.raises(ValueError, match=r"both repeat_axes and axis_name.*'slice'"):
        mc.muonclip(1e-2, axis_name=("slice", "data"), repeat_axes="slice")
    # On one device there is nothing to share, as in a trial on a laptop.
    make(repeat_axes="slice").init(random_tree(0))

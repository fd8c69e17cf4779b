"""Leaves of several matrices on a mesh: the update is that of one device."""

import functools

import jax
import numpy as np
import optax
import pytest
from helpers import assert_close, few, of_newton_schulz
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pieces import CASES, leaf_of
from test_on_mesh import traffic

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

MESHES = {
    "FSDP x tensor": {"fsdp": 4, "tensor": 2},
    "tensor x FSDP": {"tensor": 4, "fsdp": 2},
    "FSDP": {"fsdp": 8, "tensor": 1},
}
SPECS = {name: P("fsdp", "tensor") for name in CASES} | {
    "outputs first": P("tensor", "fsdp"),
    "fused, an axis each": P("fsdp", None, "tensor"),
    "gate and up of layers": P(None, "fsdp", "tensor"),
}
AXES = {name: case.axes for name, case in CASES.items()}
PARAMS = {name: leaf_of(case, i) for i, (name, case) in enumerate(CASES.items())}
GRADS = {name: leaf_of(case, 50 + i) for i, (name, case) in enumerate(CASES.items())}
SHARE = of_newton_schulz(96, mc.NS_COEFFS["keller"][:2])

make = functools.partial(
    mc.muon,
    0.1,
    dimension_numbers=AXES,
    orthogonalizer=mc.NewtonSchulz(steps=2),
    neuron_b2=0.9,
)


def step_of(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def two_steps(step, state, params, grads):
    for _ in range(2):
        params, state = step(grads, state, params)
    return params


@functools.cache
def expected():
    tx = make()
    return two_steps(jax.jit(step_of(tx)), tx.init(PARAMS), PARAMS, GRADS)


def mesh_of(name, kind=AxisType.Auto):
    sizes = MESHES[name]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * 2)


WAYS = [
    (name, kind, is_told)
    for name in MESHES
    for kind, is_told in (
        (AxisType.Auto, True),
        (AxisType.Auto, False),
        (AxisType.Explicit, False),
    )
]


@pytest.mark.more
@pytest.mark.parametrize("name, kind, is_told", few(WAYS, WAYS[0]))
def test_same_as_on_one_device(name, kind, is_told):
    mesh = mesh_of(name, kind)
    placed = {leaf: NamedSharding(mesh, spec) for leaf, spec in SPECS.items()}
    params, grads = (jax.device_put(x, placed) for x in (PARAMS, GRADS))
    tx = make(shardings=placed if is_told else None)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        step = jax.jit(step_of(tx))
        found = two_steps(step, state, params, grads)
        again = step(grads, state, params)[1]
    assert_close(jax.device_get(found), jax.device_get(expected()), SHARE)
    for before, after in zip(
        jax.tree.leaves(state), jax.tree.leaves(again), strict=True
    ):
        assert before.sharding.is_equivalent_to(after.sharding, before.ndim)


@pytest.mark.more
@pytest.mark.parametrize("name", few(MESHES, "FSDP x tensor"))
def test_blocks_in_shard_map(name):
    mesh, tx = mesh_of(name), make(shardings=SPECS)

    def steps(params, grads):
        return two_steps(step_of(tx), tx.init(params), params, grads)

    mapped = jax.shard_map(
        steps, mesh=mesh, in_specs=(SPECS, SPECS), out_specs=SPECS, check_vma=False
    )
    found = jax.jit(mapped)(PARAMS, GRADS)
    assert_close(jax.device_get(found), jax.device_get(expected()), SHARE)


def sent(axes, shape, spec, sizes):
    """Bytes that one device sends in an update of one leaf."""
    names = tuple(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), names, axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, spec)
    tx = mc.scale_by_muon(dimension_numbers={"w": axes}, shardings={"w": sharding})
    w = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)}
    state = jax.eval_shape(tx.init, w)
    state = state._replace(mu=w)
    found = traffic(jax.jit(tx.update).lower(w, state).compile())
    return sum(x.bytes for x in found.values())


@pytest.mark.more
def test_heads_that_tensor_parallelism_cuts_are_not_exchanged():
    """Every device has whole heads: nothing is sent, with FSDP its part alone."""
    flat, heads = (32, 64), (32, 8, 8)
    apart = mc.MatrixAxes(0, 1, head_dim=8)
    tensor = {"fsdp": 1, "tensor": 8}
    assert sent(apart, flat, P(None, "tensor"), tensor) == 0
    assert sent(mc.MatrixAxes(0, 1), flat, P(None, "tensor"), tensor) > 0
    # A flat kernel is cut as one whose heads have an axis.
    both = {"fsdp": 4, "tensor": 2}
    of_axis = sent(mc.MuonDimensionNumbers(0, 2), heads, P("fsdp", "tensor"), both)
    assert sent(apart, flat, P("fsdp", "tensor"), both) == of_axis
    # There and back: a device's block of 8 x 32 numbers.
    assert 0 < of_axis <= 2 * 4 * 8 * 32
    # An interleaved kernel has query, key and value of a head side by side.
    fused = mc.MatrixAxes(0, 1, parts=(4, 4, 4), head_dim=4, groups=8)
    assert sent(fused, (32, 96), P(None, "tensor"), tensor) == 0

"""Shardings that say nothing, contradict themselves or are none, refused by path."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal, ones
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


MESH = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
PARAMS = {"up": normal(0, 8, 12), "norm": {"scale": ones(12)}}


def named(spec):
    return {"up": spec, "norm": P()}


REFUSED = {
    "open": (named(spec=P(P.UNCONSTRAINED, "tensor")), "'up' .* UNCONSTRAINED"),
    "twice": (named(spec=P("tensor", "tensor")), r"'up' .* \['tensor'\] twice"),
    "twice in one": (named(spec=P(("fsdp", "fsdp"))), r"'up' .* \['fsdp'\] twice"),
    "unreduced": (named(spec=P("fsdp", unreduced={"tensor"})), "'up' .* unreduced"),
    "reduced": (named(spec=P("fsdp", reduced={"tensor"})), "'up' .* reduced"),
    "absent": (named(spec=P("pipe")), r"'up' .* lacks: \['pipe'\]"),
    "long": (named(spec=P(None, None, "fsdp")), "'up' .* too many entries"),
    "uneven": (named(spec=P(None, ("fsdp", "tensor"))), "'up' .* does not divide"),
    "tuples": (named(spec=("fsdp", None)), "'up/0' is 'fsdp'; it must be"),
    "a string": ("fsdp", "is 'fsdp'; it must be a jax.sharding.NamedSharding"),
    "a mesh": (MESH, "it must be a jax.sharding.NamedSharding"),
    "one device": (
        named(spec=SingleDeviceSharding(jax.devices()[0])),
        "'up' is SingleDeviceSharding.* must be a jax.sharding.NamedSharding",
    ),
    "half a tree": ({"up": P("fsdp")}, "no entry for 'norm/scale'"),
    "too much": (named(spec=P()) | {"x": P()}, "names 'x'"),
    "other order": (
        named(spec=NamedSharding(Mesh(MESH.devices[::-1], MESH.axis_names), P("fsdp")))
        | {"norm": NamedSharding(MESH, P())},
        "different meshes",
    ),
}


@pytest.mark.parametrize("make", [mc.muon, mc.muonclip])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_init(name, make):
    shardings, message = REFUSED[name]
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=message):
        make(1e-2, shardings=shardings).init(PARAMS)


def test_specs_without_a_mesh():
    with pytest.raises(ValueError, match="there is no mesh: call jax.set_mesh"):
        mc.muon(1e-2, shardings=P("fsdp")).init(PARAMS)


@pytest.mark.more
def test_names_of_axes_in_a_list():
    """As good as a tuple; what is no name is refused."""
    state = mc.muon(1e-2).init(PARAMS)
    mapped = jax.vmap(
        lambda g: mc.muon(1e-2, axis_name=["data"]).update(g, state, PARAMS)[0],
        axis_name="data",
    )
    found = mapped(jax.tree.map(lambda x: jnp.stack([x, 3 * x]), PARAMS))
    expected, _ = mc.muon(1e-2).update(
        jax.tree.map(lambda x: 2 * x, PARAMS), state, PARAMS
    )
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[0], found), expected, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="axis_name must be a name or a tuple"):
        mc.muon(1e-2, axis_name=[["data"]])


def test_a_function_under_inject_hyperparams_by_static_args():
    """Optax calls other functions with the count of steps, as schedules."""
    specs = jax.tree.map(lambda _: P(), PARAMS) | {"up": P("fsdp")}
    make = optax.inject_hyperparams(mc.muon, static_args=("shardings",))
    with jax.set_mesh(MESH):
        state = make(1e-2, shardings=lambda params: specs).init(PARAMS)
    mu = state.inner_state.inner_states["muon"].inner_state[0].mu["up"]
    assert mu.sharding.spec == P("fsdp") and np.all(mu == 0)

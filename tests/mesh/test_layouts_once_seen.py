"""What `init` saw of arrays is where an update under automatic axes looks for them."""

import jax
import numpy as np
import optax
import pytest
from helpers import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


A = AxisType.Auto
CUT, ELSEWHERE, WHOLE = P("a", "b"), P(("b", "a")), P()


def on(mesh, spec):
    params = {f"w{i}": normal(i, 16, 32) for i in range(3)}
    return jax.device_put(params, NamedSharding(mesh, spec))


def make_mesh(*sizes):
    return jax.make_mesh(sizes, ("a", "b"), axis_types=(A, A))


def program(tx, params):
    """Lowered with a state that `tx` itself did not make."""
    state = mc.scale_by_muon().init(params)
    return jax.jit(tx.update).lower(params, state)


@pytest.mark.parametrize("then", [CUT, ELSEWHERE, WHOLE])
def test_a_wrong_guess_costs_no_correctness(then):
    mesh = make_mesh(4, 2)
    tx = mc.scale_by_muon()
    tx.init(on(mesh, CUT))
    params = on(mesh, then)
    updates, _ = jax.jit(tx.update)(params, mc.scale_by_muon().init(params))
    alone, whole = mc.scale_by_muon(), jax.device_get(params)
    expected, _ = alone.update(whole, alone.init(whole))
    for name in params:
        np.testing.assert_allclose(updates[name], expected[name], atol=1e-6)


@pytest.mark.parametrize("first", [CUT, ELSEWHERE])
def test_seen_cut_is_remembered(first):
    mesh = make_mesh(4, 2)
    tx = mc.scale_by_muon()
    tx.init(on(mesh, first))
    lowered = program(tx, on(mesh, first))
    assert "CustomSPMDPartitioning" not in lowered.as_text()
    text = lowered.compile().as_text()
    assert text.count(" all-to-all(") == 2
    assert "all-gather" not in text


@pytest.mark.parametrize("mesh", [(4, 2), (2, 4)])
@pytest.mark.parametrize("first", [WHOLE, None])
def test_seen_whole_or_on_another_mesh_is_not(mesh, first):
    tx = mc.scale_by_muon()
    seen = make_mesh(*mesh) if first is WHOLE else make_mesh(*mesh[::-1])
    tx.init(on(seen, WHOLE if first is WHOLE else CUT))
    lowered = program(tx, on(make_mesh(*mesh), CUT))
    assert "CustomSPMDPartitioning" in lowered.as_text()


def test_another_shape_is_not():
    mesh = make_mesh(4, 2)
    tx = mc.scale_by_muon()
    tx.init(jax.device_put({"w0": normal(0, 8, 8)}, NamedSharding(mesh, CUT)))
    assert "CustomSPMDPartitioning" in program(tx, on(mesh, CUT)).as_text()


def test_every_parameter_by_its_own_path():
    mesh = make_mesh(4, 2)
    specs = {"w0": CUT, "w1": ELSEWHERE, "w2": WHOLE}
    params = {name: on(mesh, spec)[name] for name, spec in specs.items()}
    tx = mc.muon(1e-3)
    state = tx.init(params)
    lowered = jax.jit(tx.update).lower(params, state, params)
    assert "CustomSPMDPartitioning" not in lowered.as_text()
    updates, _ = jax.jit(tx.update)(params, state, params)
    for name, spec in specs.items():
        sharding = NamedSharding(mesh, spec)
        assert updates[name].sharding.is_equivalent_to(sharding, 2)


def test_params_that_left_the_mesh_are_forgotten():
    mesh = make_mesh(4, 2)
    tx = mc.scale_by_muon()
    tx.init(on(mesh, CUT))
    alone = {f"w{i}": normal(i, 16, 32) for i in range(3)}
    alone = jax.device_put(alone, jax.devices()[0])
    state = tx.init(alone)
    updates, _ = jax.jit(tx.update)(alone, state)
    assert updates["w0"].shape == (16, 32)
    assert "CustomSPMDPartitioning" in program(tx, on(mesh, CUT)).as_text()


@pytest.mark.parametrize("options", [{}, {"neuron_b2": 0.9}])
def test_init_of_params_on_one_device_under_a_mesh(options):
    """As of a checkpoint restored to one device, to be moved afterwards."""
    params = {f"w{i}": normal(i, 16, 32) for i in range(3)}
    params = jax.device_put(params, jax.devices()[0])
    with jax.set_mesh(make_mesh(4, 2)):
        state = mc.muon(0.1, **options).init(params)
    mu = optax.tree.get(state, "mu", filtering=lambda path, _: "muon" in str(path))
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(mu))

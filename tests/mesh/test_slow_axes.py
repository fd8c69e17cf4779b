"""Along slow axes copies of a matrix repeat the work, and send nothing."""

import functools
import re

import jax
import numpy as np
import pytest
from helpers import first_update, mesh_of, normal, on_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

# Numbers of matrices that no four devices share out evenly.
PARAMS = {"up": normal(0, 3, 16, 32), "down": normal(1, 5, 32, 16)}
SPECS = {"up": P(None, "fsdp"), "down": P(None, None, "fsdp")}
OPTIONS = {
    "dimension_numbers": MuonDimensionNumbers(-2, -1),
    "orthogonalizer": mc.NewtonSchulz(steps=1),
}


mesh_of_slices = functools.partial(mesh_of, slice=2, fsdp=4)


def groups_that_talk(compiled):
    """The devices of each group of each collective."""
    program = compiled.as_text()
    listed = re.findall(r"replica_groups=\{\{([^=]*)\}\}", program)
    groups = [group for found in listed for group in found.split("},{")]
    found = [{*map(int, group.split(","))} for group in groups]
    # From JAX 0.12 on by the axes of the mesh.
    devices = np.arange(8).reshape(2, 4)
    for names in re.findall(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", program):
        rows = {"'slice'": devices.T, "'fsdp'": devices}.get(names, [devices.ravel()])
        found += [{*map(int, row)} for row in rows]
    return found


def of_one_device():
    return first_update(mc.scale_by_muon(**OPTIONS), PARAMS)


def assert_as_on_one_device(found):
    for name, expected in of_one_device().items():
        # Each singular value is magnified by 3.5 at most, and a sum has 32 terms.
        share = 3.5 * 32 * 2**-24 * np.abs(expected).max()
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=share)


def update_on(mesh, **options):
    shardings = on_mesh(mesh, SPECS)
    params = jax.device_put(PARAMS, shardings)
    told = {"shardings": shardings} if options.pop("is_told", True) else {}
    tx = mc.scale_by_muon(**OPTIONS, **told, **options)
    with jax.set_mesh(mesh):
        state = tx.init(params)
        compiled = jax.jit(tx.update).lower(params, state).compile()
        return compiled(params, state)[0], groups_that_talk(compiled)


@pytest.mark.more
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_nothing_is_sent_between_slices(kind):
    found, groups = update_on(mesh_of_slices(kind), slow_axes="slice")
    assert_as_on_one_device(found)
    first, second = {0, 1, 2, 3}, {4, 5, 6, 7}
    assert groups and all(group <= first or group <= second for group in groups)


@pytest.mark.more
def test_by_default_slices_share_the_work():
    _, groups = update_on(mesh_of_slices())
    assert any({0, 4} <= group for group in groups)


@pytest.mark.more
@pytest.mark.parametrize("slow_axes", ["slice", ("slice", "fsdp")])
def test_untold(slow_axes):
    found, _ = update_on(mesh_of_slices(), slow_axes=slow_axes, is_told=False)
    assert_as_on_one_device(found)


@pytest.mark.more
@pytest.mark.parametrize("check", [True, False])
def test_inside_shard_map(check):
    """A leaf that the slow axis cuts comes along."""
    params = PARAMS | {"experts": normal(2, 2, 3, 8, 16)}
    specs = SPECS | {"experts": P("slice", None, "fsdp")}
    alone = mc.scale_by_muon(**OPTIONS)
    state = alone.init(params)
    tx = mc.scale_by_muon(
        **OPTIONS, shardings=specs, axis_name="slice", slow_axes="slice"
    )
    of_state = jax.tree.map(lambda _: P(), state)._replace(mu=specs)
    step = jax.shard_map(
        lambda grads, state: tx.update(grads, state)[0],
        mesh=mesh_of_slices(),
        in_specs=(specs, of_state),
        out_specs=specs,
        check_vma=check,
    )
    found = jax.jit(step)(params, state)
    assert_as_on_one_device(found)
    expected = alone.update(params, state)[0]["experts"]
    np.testing.assert_allclose(found["experts"], expected, rtol=0, atol=1e-5)


@pytest.mark.more
def test_replicas_that_all_do_everything():
    tx = mc.scale_by_muon(**OPTIONS, axis_name="data", slow_axes="data")
    each = {name: np.stack([x] * 4) for name, x in PARAMS.items()}
    update = jax.pmap(functools.partial(first_update, tx), axis_name="data")
    found = update(each)
    for replica in range(4):
        assert_as_on_one_device({name: x[replica] for name, x in found.items()})
    assert " all-gather(" not in update.lower(each).compile().as_text()


def test_an_axis_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"slow_axes names .*\['pod'\].*'slice'"):
        update_on(mesh_of_slices(), slow_axes=("slice", "pod"))
    with pytest.raises(ValueError, match="slow_axes must be a name or a tuple"):
        mc.muon(1e-2, slow_axes=3)

"""Blocks of a matrix against what JAX puts on each device."""

import jax
import numpy as np
import pytest
from internals import axis_roles, AxisRoles, block_layout, local_view, matrix_view
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers


PLAIN = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
IN = MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
OUT = MuonDimensionNumbers(reduction_axis=(-3, -2), output_axis=-1)
CASES = [
    ((8, 16), PLAIN, P("a", "b")),
    ((16, 8), PLAIN, P("b", "a")),
    ((16, 8), PLAIN, P(("b", "a"))),
    ((16, 8), PLAIN, P(None, ("a", "b"))),
    ((8, 8), PLAIN, P("a")),
    ((3, 8, 16), PLAIN, P(None, "a", "b")),
    ((4, 8, 16), PLAIN, P("a", None, "b")),
    ((8, 8, 4), PLAIN, P(("a", "b"))),
    ((8, 4, 6), IN, P("a", "b")),
    ((4, 8, 6), OUT, P("a", None, "b")),
    ((2, 4, 2, 8), OUT, P("b", "a")),
    ((8, 6, 8), IN, P("a", None, "b")),
    ((8, 8, 3), IN, P(None, ("b", "a"))),
    ((4, 8), PLAIN, P()),
]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("shape", "numbers", "spec"), CASES)
def test_blocks_of_all_devices_make_up_the_matrices(
    mesh, shape, numbers, spec, is_wide
):
    """As they are, or tall ones turned."""
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    view = matrix_view(shape, numbers)
    local, mine = (
        local_view(view, spec, mesh.shape),
        block_layout(view, spec, mesh.shape),
    )
    on_devices = jax.device_put(whole, NamedSharding(mesh, spec))
    at = {shard.device: shard for shard in on_devices.addressable_shards}

    mine = mine.wide if is_wide else mine

    # One group and one copy: the devices along the axes that cut.
    here = tuple(
        slice(None) if name in mine.roles.sharded else 0 for name in mesh.axis_names
    )
    group = np.atleast_1d(mesh.devices[here]).reshape(-1)
    blocks = np.stack([local.to_matrices(at[device].data) for device in group], axis=1)
    joined = np.asarray(mine.join(jax.numpy.asarray(blocks)))

    # Batch entries of that group, in the leaf itself.
    index = tuple(
        at[group[0]].index[axis] if axis in view.batch else slice(None)
        for axis in range(len(shape))
    )
    part = whole[index]
    expected = np.asarray(matrix_view(part.shape, numbers).to_matrices(part))
    if is_wide and expected.shape[-2] > expected.shape[-1]:
        expected = expected.swapaxes(-2, -1)
    np.testing.assert_array_equal(joined, expected)
    assert mine.shape == expected.shape[-2:]
    np.testing.assert_array_equal(mine.split(jax.numpy.asarray(joined)), blocks)


def test_what_each_axis_does_to_a_leaf():
    mesh = {"data": 2, "expert": 4, "fsdp": 2, "one": 1}
    view = matrix_view((3, 4, 8, 16), PLAIN)
    assert axis_roles(view, P(None, "expert", "fsdp", "one"), mesh) == AxisRoles(
        batch=("expert",), replicated=("data",), sharded=("fsdp",)
    )
    assert axis_roles(view, P(None, None, ("fsdp", "data")), mesh) == AxisRoles(
        batch=(), replicated=("expert",), sharded=("data", "fsdp")
    )

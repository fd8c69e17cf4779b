"""Blocks of a matrix against what JAX puts on each device."""

import jax
import numpy as np
import pytest
from internals import (
    cut_of,
    groups_of,
    local_view,
    matrix_view,
    share_out,
    to_blocks,
    to_owners,
)
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


@pytest.mark.parametrize(("shape", "numbers", "spec"), CASES)
def test_owners_have_whole_matrices_and_blocks_come_back(mesh, shape, numbers, spec):
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    view = matrix_view(shape, numbers)
    local, cut = local_view(view, spec, mesh.shape), cut_of(view, spec, mesh.shape)
    groups = groups_of(cut, mesh.shape)
    (share,) = share_out([(local.count, 1.0, groups)], 8)

    def exchange(leaf):
        matrices = to_owners(local.to_matrices(leaf), cut, share)
        back = to_blocks(matrices, cut, share).reshape(-1, *local.matrix_shape)
        return matrices[None], local.from_matrices(back)

    everywhere = P(("a", "b"))
    matrices, back = jax.jit(
        jax.shard_map(
            exchange,
            mesh=mesh,
            in_specs=(spec,),
            out_specs=(everywhere, spec),
            check_vma=False,
        )
    )(jax.device_put(whole, NamedSharding(mesh, spec)))
    np.testing.assert_array_equal(back, whole)
    # What the devices of all groups have in full slots is every matrix of the leaf.
    counts = np.empty(8, int)
    counts[groups] = share.counts
    found = np.concatenate([x[:n] for x, n in zip(matrices, counts, strict=True)])
    expected = np.asarray(view.to_matrices(whole))
    order = np.argsort(found[:, 0, 0])
    np.testing.assert_array_equal(found[order], expected[np.argsort(expected[:, 0, 0])])


def test_what_each_axis_does_to_a_leaf():
    mesh = {"data": 2, "expert": 4, "fsdp": 2, "one": 1}
    view = matrix_view((3, 4, 8, 16), PLAIN)
    cut = cut_of(view, P(None, "expert", "fsdp", "one"), mesh)
    assert (cut.batch, cut.replicated, cut.sharded) == (
        ("expert",),
        ("data",),
        ("fsdp",),
    )
    cut = cut_of(view, P(None, None, ("fsdp", "data")), mesh)
    assert (cut.batch, cut.replicated, cut.sharded) == (
        (),
        ("expert",),
        ("fsdp", "data"),
    )

"""Which device owns which matrix: the work is even."""

import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, script_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Cut, groups_of, MOST_SLOTS, share_in_a_row, share_out


def route(batch=(), replicated=(), sharded=()):
    """How a mesh cuts some matrices: whatever they are, along these axes."""
    return Cut(((8, tuple(sharded)), (8, ())), (8, 8), tuple(batch), tuple(replicated))


def shared_out(works, mesh):
    stacks = [(count, cost, groups_of(cut, mesh)) for count, cost, cut in works]
    shares = share_out(stacks, int(np.prod(list(mesh.values()))))
    loads = np.zeros(np.prod(list(mesh.values())))
    for (count, cost, group), share in zip(stacks, shares, strict=True):
        loads[group] += cost * share.counts
        assert share.counts.sum() == count
        most = MOST_SLOTS * -(-count // len(share.counts))
        assert share.counts.max() <= share.slots <= most
    return shares, loads


def test_thirty_two_on_sixty_four_leave_the_rest_to_others():
    """Llama-1B on 64 chips: the 16 without a large matrix take two squares each."""
    fsdp = route(sharded=["fsdp"])
    works = [(32, 258.0, fsdp), (48, 601.0, fsdp), (32, 9.0, fsdp)]
    (squares, large, small), _ = shared_out(works, {"fsdp": 64})
    assert large.counts.max() == 1 and squares.counts.max() == 2
    idle = large.counts == 0
    assert idle.sum() == 16 and (squares.counts[idle] == 2).all()
    assert (small.counts[~idle] == 0).all()


def test_an_idle_device_takes_few_of_many():
    """Each has a slot for all that one of them takes."""
    fsdp = route(sharded=["fsdp"])
    (_, small), _ = shared_out([(7, 100.0, fsdp), (8, 1.0, fsdp)], {"fsdp": 8})
    assert small.slots == MOST_SLOTS


@pytest.mark.parametrize("order", [1, -1])
def test_an_expensive_matrix_leaves_every_group_of_experts_its_share(order):
    """61 matrices that cost 22 experts each, on 128 groups of eight."""
    mesh = {"expert": 128, "fsdp": 8}
    experts = (540, 0.55, route(batch=["expert"], sharded=["fsdp"]))
    works = [(61, 12.1, route(sharded=["expert", "fsdp"])), experts][::order]
    _, loads = shared_out(works, mesh)
    assert loads.max() < 1.05 * loads.mean()


# Where no shardings are known, matrices are shared out in their order.


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(1, 1000)), min_size=1, max_size=5),
    st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_slots_hold_all_matrices_in_order(stacks, devices):
    shares = share_in_a_row(stacks, devices)
    for (count, _), share in zip(stacks, shares, strict=True):
        before, after = share.padding
        filled = np.pad(np.ones(count, int), (before, after))
        by_device = filled.reshape(devices, share.slots)
        np.testing.assert_array_equal(by_device.sum(axis=1), share.counts)
        # A device iterates its first slots.
        assert (np.diff(by_device, axis=1) <= 0).all()


def test_devices_without_a_large_matrix_take_the_small_ones():
    """Llama-1B on 64 devices: 48 large matrices, and 32 and 32 smaller ones."""
    shares = share_in_a_row([(32, 258.0), (48, 601.0), (32, 9.0)], 64)
    squares, large, small = (share.counts for share in shares)
    assert (258 * squares + 601 * large + 9 * small).max() == 601
    assert large.max() == 1 and squares.max() == 2
    assert not (large * (squares + small)).any()


PLAN = """
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from internals import cut_of, groups_of, matrix_view, share_out

mesh = dict(data=2, fsdp=2, tensor=2, expert=2, layer=2)
view = matrix_view((4, 8, 16), MuonDimensionNumbers(1, 2))
specs = [
    P(("layer", "expert"), ("tensor", "fsdp")),
    P(None, ("expert", "fsdp"), ("data", "layer")),
    P(),
]
cuts = [cut_of(view, spec, mesh) for spec in specs]
stacks = [(9, cost, groups_of(cut, mesh)) for cost, cut in zip([3.0, 5.0, 2.0], cuts)]
for cut, stack, share in zip(cuts, stacks, share_out(stacks, 32)):
    print(cut, stack[2].tolist(), share.counts.tolist(), share.slots, sep="\\n")
"""


@pytest.mark.more
def test_the_same_on_every_process():
    """Each process plans by itself, and names hash otherwise in each."""
    plans = {
        subprocess.run(
            [sys.executable, "-c", PLAN],
            env=script_environment() | {"PYTHONHASHSEED": seed},
            cwd=ROOT / "tests",
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(plans) == 1 and "batch=('expert', 'layer')" in plans.pop()

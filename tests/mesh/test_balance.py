"""Which device owns which matrix: the work is even."""

import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, script_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import assign_owners, assign_slots, Cut, groups_of, Work
from jax.sharding import PartitionSpec as P
from models import Model, models
from shares import sent


def route(batch=(), replicated=(), sharded=()):
    """How a mesh cuts some matrices: whatever they are, along these axes."""
    sides = (8, tuple(sharded)), (8, ())
    return Cut(sides, (8, 8), tuple(batch), tuple(replicated), (), tuple(sharded))


def shared_out(works, mesh):
    """Counts of each stack, and what each device iterates and is sent.

    A stack is a number of matrices, the cost and the entries of each, and their cut.
    """
    devices = int(np.prod(list(mesh.values())))
    stacks = [
        Work(count, cost, entries, groups_of(cut, mesh))
        for count, cost, entries, cut in works
    ]
    shares = assign_owners(stacks, devices)
    loads, sent = np.zeros((2, devices))
    for (count, cost, entries, group), counts in zip(stacks, shares, strict=True):
        loads[group] += cost * counts
        sent[group] += entries * counts
        assert counts.sum() == count
    return shares, loads, sent


def test_thirty_two_on_sixty_four_leave_the_rest_to_others():
    """Llama-1B on 64 chips: the 16 without a large matrix take two squares each."""
    fsdp = route(sharded=["fsdp"])
    works = [(32, 258.0, 4, fsdp), (48, 601.0, 16, fsdp), (32, 9.0, 1, fsdp)]
    (squares, large, small), _, _ = shared_out(works, {"fsdp": 64})
    assert large.max() == 1 and squares.max() == 2
    idle = large == 0
    assert idle.sum() == 16 and (squares[idle] == 2).all()
    assert (small[~idle] == 0).all()


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(1, 1000), st.integers(1, 1000)),
        min_size=1,
        max_size=5,
    ),
    st.integers(2, 12),
)
@settings(max_examples=60, deadline=None)
def test_an_owner_is_sent_at_most_a_matrix_above_the_mean(stacks, devices):
    """However cheap matrices are for their size: the parcel that is largest counts."""
    works = [(*stack, route(sharded=["fsdp"])) for stack in stacks]
    _, _, sent = shared_out(works, {"fsdp": devices})
    assert sent.max() <= sent.mean() + max(entries for *_, entries in stacks)


def test_parcels_of_llama_send_a_tenth_more_than_the_least():
    """There and back go 15.2 million entries a device, of two bytes each."""
    for name in ("Llama-1B, FSDP 64, stacked", "Llama-1B, FSDP 16 x tensor 4"):
        found = sent(models(4)[name], "tpu")
        assert found.exchanges == 1
        assert found.least == 2 * 2 * 16 * 60_817_408 / 64
        assert found.bytes <= 1.11 * found.least


def test_odd_blocks_are_padded_to_less_than_a_tile():
    """Blocks of 64.01 and 32.01 tiles of 1,024 entries take 65 and 33."""
    shapes = {"large": (5, 8193, 16), "small": (3, 4097, 16)}
    specs = dict.fromkeys(shapes, P(None, None, "x"))
    found = sent(Model(shapes, specs, {"x": 2}), "tpu")
    assert found.exchanges == 1
    # To two devices and back, of two bytes each: three large and two small ones.
    assert found.bytes == 2 * 2 * 2 * 1024 * (3 * 65 + 2 * 33)


@pytest.mark.parametrize("order", [1, -1])
def test_an_expensive_matrix_leaves_every_group_of_experts_its_share(order):
    """61 matrices that cost 22 experts each, on 128 groups of eight."""
    mesh = {"expert": 128, "fsdp": 8}
    experts = (540, 0.55, 1, route(batch=["expert"], sharded=["fsdp"]))
    works = [(61, 12.1, 6, route(sharded=["expert", "fsdp"])), experts][::order]
    _, loads, _ = shared_out(works, mesh)
    assert loads.max() < 1.05 * loads.mean()


# Where no shardings are known, matrices are shared out in their order.


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(1, 1000)), min_size=1, max_size=5),
    st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_slots_hold_all_matrices_in_order(stacks, devices):
    shares = assign_slots(stacks, devices)
    for (count, _), share in zip(stacks, shares, strict=True):
        before, after = share.padding
        filled = np.pad(np.ones(count, int), (before, after))
        by_device = filled.reshape(devices, share.slots)
        np.testing.assert_array_equal(by_device.sum(axis=1), share.counts)
        # A device iterates its first slots.
        assert (np.diff(by_device, axis=1) <= 0).all()


def test_devices_without_a_large_matrix_take_the_small_ones():
    """Llama-1B on 64 devices: 48 large matrices, and 32 and 32 smaller ones."""
    shares = assign_slots([(32, 258.0), (48, 601.0), (32, 9.0)], 64)
    squares, large, small = (share.counts for share in shares)
    assert (258 * squares + 601 * large + 9 * small).max() == 601
    assert large.max() == 1 and squares.max() == 2
    assert not (large * (squares + small)).any()


PLAN = """
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from internals import assign_owners, cut_of, groups_of, matrix_view, Work

mesh = dict(data=2, fsdp=2, tensor=2, expert=2, layer=2)
view = matrix_view((4, 8, 16), MuonDimensionNumbers(1, 2))
specs = [
    P(("layer", "expert"), ("tensor", "fsdp")),
    P(None, ("expert", "fsdp"), ("data", "layer")),
    P(),
]
cuts = [cut_of(view, spec, mesh) for spec in specs]
costs = [3.0, 5.0, 2.0]
stacks = [Work(9, cost, 1, groups_of(cut, mesh)) for cost, cut in zip(costs, cuts)]
for cut, stack, counts in zip(cuts, stacks, assign_owners(stacks, 32)):
    print(cut, stack.groups.tolist(), counts.tolist(), sep="\\n")
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

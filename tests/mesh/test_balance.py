"""Which device owns which matrix: none is lost, and the work is even."""

import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, script_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import assign_owners, AxisRoles, groups_of, MOST_SLOTS, Work


MESH = {"a": 4, "one": 1, "b": 2}
ROUTES = [
    AxisRoles((), (), ("a", "b")),
    AxisRoles((), ("a",), ("b",)),
    AxisRoles(("b",), (), ("a",)),
    AxisRoles(("a",), ("b",), ()),
    AxisRoles(("a", "b"), (), ()),
    AxisRoles((), ("a", "b"), ()),
]
works = st.builds(
    Work, st.integers(1, 40), st.integers(1, 1000), st.sampled_from(ROUTES)
)


def loads_of(works, owners, mesh):
    loads = np.zeros(np.prod(list(mesh.values())))
    for work, owner in zip(works, owners, strict=True):
        loads[groups_of(work.roles, mesh)] += work.cost * owner.counts
    return loads


@given(st.lists(works, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_every_matrix_has_one_owner_who_knows_it(works):
    for work, owners in zip(works, assign_owners(works, MESH), strict=True):
        groups, copies, devices, slots = owners.slots.shape
        members = copies * devices
        assert groups * members == 8
        assert slots <= MOST_SLOTS * -(-work.count // members)
        np.testing.assert_array_equal(owners.counts.sum(axis=(1, 2)), work.count)
        for group in range(groups):
            taken = [
                owners.slots[group, copy, device, slot]
                for copy in range(copies)
                for device in range(devices)
                for slot in range(owners.counts[group, copy, device])
            ]
            assert sorted(taken) == list(range(work.count))
            flat = owners.slots[group].reshape(-1)
            np.testing.assert_array_equal(
                flat[owners.places[group]], np.arange(work.count)
            )


@given(
    st.lists(st.tuples(st.integers(8, 40), st.floats(1, 1000)), min_size=1, max_size=5)
)
@settings(max_examples=60, deadline=None)
def test_where_all_can_share_no_one_does_more_than_a_matrix_above_the_mean(sizes):
    works = [Work(count, cost, ROUTES[0]) for count, cost in sizes]
    loads = loads_of(works, assign_owners(works, MESH), MESH)
    # Graham's bound for the greedy schedule.
    assert loads.max() <= loads.mean() + max(cost for _, cost in sizes) + 1e-6


def test_thirty_two_on_sixty_four_leave_the_rest_to_others():
    """Llama-1B on 64 chips: the 16 without a large matrix take two squares each."""
    route = AxisRoles((), (), ("fsdp",))
    works = [Work(32, 258.0, route), Work(48, 601.0, route), Work(32, 9.0, route)]
    squares, large, small = assign_owners(works, {"fsdp": 64})
    assert large.counts.max() == 1 and squares.counts.max() == 2
    idle = large.counts[0, 0] == 0
    assert idle.sum() == 16 and (squares.counts[0, 0][idle] == 2).all()
    assert (small.counts[0, 0][~idle] == 0).all()


@pytest.mark.parametrize("order", [1, -1])
def test_an_expensive_matrix_leaves_every_group_of_experts_its_share(order):
    """61 matrices that cost 22 experts each, on 128 groups of eight."""
    mesh = {"expert": 128, "fsdp": 8}
    experts = Work(540, 0.55, AxisRoles(("expert",), (), ("fsdp",)))
    works = [Work(61, 12.1, AxisRoles((), (), ("expert", "fsdp"))), experts][::order]
    loads = loads_of(works, assign_owners(works, mesh), mesh)
    assert loads.max() < 1.05 * loads.mean()


PLAN = """
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from internals import assign_owners, axis_roles, matrix_view, Work

mesh = dict(data=2, fsdp=2, tensor=2, expert=2, layer=2)
view = matrix_view((4, 8, 16), MuonDimensionNumbers(1, 2))
works = [
    Work(9, cost, axis_roles(view, spec, mesh))
    for cost, spec in [
        (3.0, P(("layer", "expert"), ("tensor", "fsdp"))),
        (5.0, P(None, ("expert", "fsdp"), ("data", "layer"))),
        (2.0, P()),
    ]
]
for work, owners in zip(works, assign_owners(works, mesh)):
    print(work, owners.counts.tolist(), owners.slots.tolist(), sep="\\n")
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
    assert len(plans) == 1 and "Work(count=9" in plans.pop()

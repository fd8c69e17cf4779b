"""Which device owns which matrix: work assigned by cost over the devices of a mesh."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .block_layout import AxisRoles


#: The most matrices of a stack that one device takes, over the least that would do.
#: Every device sends as much to each other, so for one that took many all would send
#: padding.
MOST_SLOTS = 2

#: What the load of a device's neighbours counts against its own: it decides ties.
TIE = 1e-6


@dataclasses.dataclass(frozen=True)
class Work:
    """A stack of matrices, each of which one device of its group is to own."""

    count: int  # in each group
    cost: float  # of one matrix
    roles: AxisRoles


@dataclasses.dataclass(frozen=True, eq=False)
class Owners:
    """Which devices iterate the matrices of a stack.

    Groups are along `roles.batch`, and in each of them copies along `roles.replicated`
    and devices along `roles.sharded`.
    """

    counts: np.ndarray  # (groups, copies, devices): how many each has, in a row
    order: np.ndarray  # (groups, copies * devices): whose come first, and whose next

    @functools.cached_property
    def most(self) -> int:
        """Slots of each device."""
        return max(1, int(self.counts.max(initial=1)))

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first matrix of each, `(groups, copies, devices)`."""
        in_order = np.take_along_axis(self._of_members(self.counts), self.order, 1)
        starts = np.empty_like(in_order)
        behind = np.cumsum(in_order, axis=1)
        np.put_along_axis(starts, self.order, behind - in_order, axis=1)
        return starts.reshape(self.counts.shape)

    @functools.cached_property
    def beyond(self) -> int:
        """How far the slots of some reach beyond the stack."""
        return int(self.starts.max(initial=0)) + self.most - int(self.counts[0].sum())

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """The matrix in each slot, `(groups, copies, devices, slots)`, or another."""
        last = self.counts[0].sum() - 1
        return np.minimum(self.starts[..., None] + np.arange(self.most), last)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Of each matrix an index into all slots of its group, `(groups, matrices)`."""
        places = np.empty((len(self.order), self.counts[0].sum()), np.int32)
        tables = map(self._of_members, (self.starts, self.counts))
        for of_group, *rows in zip(places, *tables, strict=True):
            for member, (start, count) in enumerate(zip(*rows, strict=True)):
                slots = member * self.most + np.arange(count)
                of_group[start : start + count] = slots
        return places

    def _of_members(self, table: np.ndarray) -> np.ndarray:
        return table.reshape(len(table), -1)


def assign_owners(works: Sequence[Work], mesh: Mapping[str, int]) -> list[Owners]:
    """Gives each matrix, the most expensive first, to the least loaded device.

    `mesh` maps names of axes to sizes.
    """
    groups = [groups_of(work.roles, mesh) for work in works]
    loads = np.zeros(math.prod(mesh.values()))
    order = sorted(range(len(works)), key=lambda i: -works[i].cost)
    owners = {}
    for done, i in enumerate(order):
        rest = [groups[j] for j in order[done + 1 :]]
        owners[i] = _place(works[i], groups[i], rest, loads)
    return [owners[i] for i in range(len(works))]


def groups_of(roles: AxisRoles, mesh: Mapping[str, int]) -> np.ndarray:
    """Numbers of the devices in the mesh, as `(groups, copies, devices)`."""
    names = [name for name, size in mesh.items() if size > 1]
    numbers = np.arange(math.prod(mesh.values())).reshape([mesh[n] for n in names])
    order = [names.index(name) for axes in roles for name in axes]
    sizes = [math.prod(mesh[name] for name in axes) for axes in roles]
    return numbers.transpose(order).reshape(sizes)


def _place(
    work: Work,
    groups: np.ndarray,
    rest: Sequence[np.ndarray],
    loads: np.ndarray,
) -> Owners:
    """Gives away the matrices of each group, and adds their cost to `loads`."""
    members = groups.reshape(len(groups), -1)
    most = MOST_SLOTS * math.ceil(work.count / members.shape[1])
    taken, everyone = np.zeros_like(members), np.arange(len(members))
    for _ in range(work.count):
        busy = (loads + TIE * _crowding(loads, rest))[members]
        chosen = np.argmin(np.where(taken < most, busy, np.inf), axis=1)
        taken[everyone, chosen] += 1
        loads[members[everyone, chosen]] += work.cost
    # Whoever has most comes last, so that others who take as many stay in the stack.
    busiest = members.shape[1] - 1 - taken[:, ::-1].argmax(axis=1)
    is_last = np.arange(members.shape[1]) == busiest[:, None]
    order = np.argsort(is_last, axis=1, kind="stable").astype(np.int32)
    return Owners(taken.reshape(groups.shape).astype(np.int32), order)


def _crowding(loads: np.ndarray, rest: Sequence[np.ndarray]) -> np.ndarray:
    """What the groups that a device is in for the rest of the work do on average.

    Where they are many, an expensive matrix is to leave each of them a fair share.
    """
    crowding = np.zeros_like(loads)
    for groups in rest:
        crowding[groups] += loads[groups].mean(axis=(1, 2), keepdims=True)
    return crowding

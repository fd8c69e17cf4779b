"""The device that iterates each matrix: work shared out by cost over a mesh.

Matrices are iterated whole. To cut one over devices would take an exchange for every
product, where to send it to one takes two in all.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .block_layout import AxisRoles


#: The most matrices of a stack that one device takes, over the least that would do.
#: Every device sends as much to each other, so for one that took many all would send
#: padding.
MOST_SLOTS = 2

#: The weight of the load of a device's neighbors against its own: it decides ties.
TIE = 1e-6


@dataclasses.dataclass(frozen=True)
class Work:
    """A stack of matrices, each of which one device of its group is to own."""

    count: int  # in each group
    cost: float  # of one matrix
    roles: AxisRoles


@dataclasses.dataclass(frozen=True, eq=False)
class Owners:
    """The devices that iterate the matrices of a stack, each some in a row.

    Groups are along `roles.batch`, and in each of them copies along `roles.replicated`
    and devices along `roles.sharded`.
    """

    counts: np.ndarray  # (groups, copies, devices): how many matrices each has
    order: np.ndarray  # (groups, copies * devices): whose come first, and whose next

    @functools.cached_property
    def most(self) -> int:
        """Slots of each device: it has as many as the one with the most matrices."""
        return max(1, int(self.counts.max(initial=1)))

    @property
    def are_even(self) -> bool:
        """True if all devices have as many matrices."""
        return bool((self.counts == self.most).all())

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first matrix of each, `(groups, copies, devices)`."""
        counts = self.counts.reshape(len(self.counts), -1)
        in_order = np.take_along_axis(counts, self.order, 1)
        starts, ends = np.empty_like(counts), np.cumsum(in_order, axis=1)
        np.put_along_axis(starts, self.order, ends - in_order, axis=1)
        return starts.reshape(self.counts.shape)

    @property
    def beyond(self) -> int:
        """The slots of some device that reach beyond the stack."""
        return int(self.starts.max(initial=0)) + self.most - int(self.counts[0].sum())

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """The matrix in each slot, `(groups, copies, devices, slots)`, or another."""
        last = max(0, int(self.counts[0].sum()) - 1)
        return np.minimum(self.starts[..., None] + np.arange(self.most), last)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """For each matrix, its slot index within its group, `(groups, matrices)`."""
        places = np.empty((len(self.order), self.counts[0].sum()), np.int32)
        tables = (x.reshape(len(x), -1) for x in (self.starts, self.counts))
        for of_group, *rows in zip(places, *tables, strict=True):
            for member, (start, count) in enumerate(zip(*rows, strict=True)):
                slots = member * self.most + np.arange(count)
                of_group[start : start + count] = slots
        return places


def assign_owners(works: Sequence[Work], mesh: Mapping[str, int]) -> list[Owners]:
    """Gives each matrix, the most expensive first, to the least loaded device.

    No device then does more than one matrix above the mean, if all may take all
    (Graham, 1969). `mesh` maps names of axes to sizes.
    """
    groups = [groups_of(work.roles, mesh) for work in works]
    # Longest processing time first (Graham, "Bounds on multiprocessing timing
    # anomalies", 1969): at most 4/3 of the optimum where all devices may take all, and
    # next to it with the many matrices of a model.
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
    work: Work, groups: np.ndarray, rest: Sequence[np.ndarray], loads: np.ndarray
) -> Owners:
    """Gives away the matrices of each group, and adds their cost to `loads`."""
    members = groups.reshape(len(groups), -1)
    # Matrices of a stack cost the same, so only how many each device takes is decided
    # here. All groups choose at once, each for itself.
    most = MOST_SLOTS * math.ceil(work.count / members.shape[1])
    taken, everyone = np.zeros_like(members), np.arange(len(members))
    for _ in range(work.count):
        # Of devices with equal loads the one whose neighbors are idle: what comes later
        # may be for its group alone, and is then shared out evenly.
        busy = (loads + TIE * _crowding(loads, rest))[members]
        chosen = np.argmin(np.where(taken < most, busy, np.inf), axis=1)
        taken[everyone, chosen] += 1
        loads[members[everyone, chosen]] += work.cost
    # Put the device with the most matrices last: slices of as many slots for the others
    # then stay in bounds.
    busiest = members.shape[1] - 1 - taken[:, ::-1].argmax(axis=1)
    is_last = np.arange(members.shape[1]) == busiest[:, None]
    order = np.argsort(is_last, axis=1, kind="stable").astype(np.int32)
    return Owners(taken.reshape(groups.shape).astype(np.int32), order)


def _crowding(loads: np.ndarray, rest: Sequence[np.ndarray]) -> np.ndarray:
    """The mean load of the groups that a device is in for the rest of the work.

    Where they are many, an expensive matrix is to leave each of them a fair share.
    """
    crowding = np.zeros_like(loads)
    for groups in rest:
        crowding[groups] += loads[groups].mean(axis=(1, 2), keepdims=True)
    return crowding


class Consecutive(NamedTuple):
    """The matrices of a stack in the slots of all devices, one device after another."""

    first: int  # slot of the first matrix
    counts: np.ndarray  # matrices of each device
    slots: int  # of each device

    @property
    def padding(self) -> tuple[int, int]:
        """Empty slots before the matrices and after them."""
        after = len(self.counts) * self.slots - self.first - int(self.counts.sum())
        return self.first, after


def assign_consecutive(
    counts: Sequence[int], costs: Sequence[float], devices: int
) -> list[Consecutive]:
    """Gives each stack, that of the most expensive matrices first, to idle devices.

    Matrices that stay in order reach their devices by padding. To take them in any
    other order would be a gather, which XLA does not partition well.
    """
    loads, found = np.zeros(devices), {}
    for i in sorted(range(len(counts)), key=lambda i: -costs[i]):
        # Few devices with full slots, or more of them with half as many: the second is
        # better where the first stacks have left some devices nothing to do.
        least = math.ceil(counts[i] / devices)
        candidates = [
            _where_least_busy(loads, counts[i], slots)
            for slots in (least, MOST_SLOTS * least)
        ]
        all_loads = [loads + float(costs[i]) * chosen.counts for chosen in candidates]
        best = int(np.argmin([x.max() for x in all_loads]))
        found[i], loads = candidates[best], all_loads[best]
    return [found[i] for i in range(len(counts))]


def _where_least_busy(loads: np.ndarray, count: int, slots: int) -> Consecutive:
    # Devices with full slots in a row, of which the busiest counts: all of them are
    # done when it is.
    used = math.ceil(count / slots)
    busiest = np.lib.stride_tricks.sliding_window_view(loads, used).max(axis=1)
    start = int(np.argmin(busiest))
    counts = np.zeros(len(loads), np.int32)
    counts[start : start + used] = slots
    # The last one has what is left.
    counts[start + used - 1] = count - (used - 1) * slots
    return Consecutive(start * slots, counts, slots)

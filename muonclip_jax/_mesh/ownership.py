"""Which device owns which matrix: work assigned by cost over the devices of a mesh."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class Owners(NamedTuple):
    """Which devices iterate the matrices of a stack.

    Groups lie along `roles.batch`, and in each of them copies along `roles.replicated`
    and devices along `roles.sharded`.
    """

    starts: np.ndarray  # (groups, copies, devices): the first matrix of each
    counts: np.ndarray  # (groups, copies, devices): how many, in a row
    most: int  # slots that each has

    @property
    def slots(self) -> np.ndarray:
        """The matrix in each slot, `(groups, copies, devices, slots)`, or any other."""
        last = int((self.starts + self.counts).max(initial=1)) - 1
        return np.minimum(self.starts[..., None] + np.arange(self.most), last)

    @property
    def places(self) -> np.ndarray:
        """Of each matrix, `(groups, matrices)`: index into `(copies, devices, slots)`."""
        counts = self.counts.reshape(len(self.counts), -1)
        of_groups = [
            np.concatenate([i * self.most + np.arange(n) for i, n in enumerate(group)])
            for group in counts
        ]
        return np.stack(of_groups).astype(np.int32)


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
    order = [names.index(name) for role in roles for name in role]
    sizes = [math.prod(mesh[name] for name in role) for role in roles]
    return numbers.transpose(order).reshape(sizes)


def _place(
    work: Work, groups: np.ndarray, rest: Sequence[np.ndarray], loads: np.ndarray
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
    # One matrix costs what another does, so each takes them in a row.
    starts = np.cumsum(taken, axis=1) - taken
    tables = (x.reshape(groups.shape).astype(np.int32) for x in (starts, taken))
    return Owners(*tables, int(taken.max(initial=1)))


def _crowding(loads: np.ndarray, rest: Sequence[np.ndarray]) -> np.ndarray:
    """What the groups that a device is in for the rest of the work do on average.

    Where they are many, an expensive matrix is to leave each of them a fair share.
    """
    crowding = np.zeros_like(loads)
    for groups in rest:
        crowding[groups] += loads[groups].mean(axis=(1, 2), keepdims=True)
    return crowding

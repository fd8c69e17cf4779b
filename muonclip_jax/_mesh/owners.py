"""How a mesh cuts matrices, and which device owns which.

Matrices are iterated whole, each by its owner. To cut one over devices would take an
exchange for every product; to send it to its owner and back takes two in all.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from .._layout.shardings import blocks_along, mesh_axes
from .._matrices.stacks import MatrixView, Stack


class Cut(NamedTuple):
    """How a mesh cuts the matrices of a leaf.

    - `factors`: of the inputs and then of the outputs, the size and the mesh axes that
        cut it, the major one first. Most sides are one factor.
    - `shape`: of a matrix.
    - `batch`: along these mesh axes devices hold different matrices.
    - `replicated`: along these they hold copies and share the work.
    - `repeated`: along these slow axes they hold copies, and each does all the work.
    - `sharded`: along these they hold blocks of the same.

    Axes are in the order of the mesh.
    """

    factors: tuple[tuple[int, tuple[str, ...]], ...]
    shape: tuple[int, int]
    batch: tuple[str, ...]
    replicated: tuple[str, ...]
    repeated: tuple[str, ...]
    sharded: tuple[str, ...]

    @property
    def member_axes(self) -> tuple[str, ...]:
        """The axes whose devices are a group: its members divide the matrices."""
        return self.replicated + self.sharded


class OwnedStack(NamedTuple):
    """Matrices that a mesh cuts alike, and how many each device has.

    The parts of the stack are what one device holds: blocks.
    """

    name: str  # by which benchmarks know its loop
    stack: Stack
    cut: Cut
    counts: np.ndarray  # of each member

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that a device holds of a matrix."""
        return self.stack.parts[0][1].view.matrix_shape

    @property
    def padding(self) -> float:
        """The slots that its own exchange would send, over the matrices."""
        return int(self.counts.max()) * len(self.counts) / max(1, self.stack.count)

    @property
    def is_even(self) -> bool:
        """Whether all owners have the same number."""
        return bool((self.counts == self.counts[0]).all())


def cut_of(
    view: MatrixView,
    spec: PartitionSpec,
    mesh: Mapping[Any, int],
    slow: Collection[Any] = (),
) -> Cut:
    """Returns the cut; `mesh` has sizes by name; copies along `slow` share no work."""
    entries = [*spec, *[None] * (len(view.shape) - len(spec))]
    # Axes of one device cut nothing. Without them leaves that are cut alike have equal
    # cuts, and share a stack.
    names = [tuple(n for n in mesh_axes(e) if mesh[n] > 1) for e in entries]

    def factors(axes: Sequence[int]) -> list[tuple[int, tuple[str, ...]]]:
        merged: list[tuple[int, tuple[str, ...]]] = []
        for axis in axes:
            size, cut = view.shape[axis], names[axis]
            # A cut axis and whole ones after it become one axis.
            if merged and not cut:
                size, cut = merged[-1][0] * size, merged.pop()[1]
            merged.append((size, cut))
        return merged

    inner = (*factors(view.reduction), *factors(view.output))
    batch = {name for axis in view.batch for name in names[axis]}
    sharded = {name for _, cut in inner for name in cut}
    axes = [name for name, size in mesh.items() if size > 1]
    return Cut(
        inner,
        view.matrix_shape,
        tuple(name for name in axes if name in batch),
        tuple(name for name in axes if name not in batch | sharded | {*slow}),
        tuple(name for name in axes if name in slow and name not in batch | sharded),
        tuple(name for name in axes if name in sharded),
    )


def local_view(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]
) -> MatrixView:
    """Returns the view of the block that one device holds of the leaf."""
    shape = (size // n for size, n in blocks_along(view.shape, spec, mesh))
    return dataclasses.replace(view, shape=tuple(shape))


def groups_of(cut: Cut, mesh: Mapping[str, int]) -> np.ndarray:
    """Returns the numbers of devices in the mesh, as `(groups, members)`."""
    names = [name for name, size in mesh.items() if size > 1]
    # As `axis_index` over all axes numbers them: the first axis is the major one.
    numbers = np.arange(math.prod(mesh.values())).reshape([mesh[n] for n in names])
    apart = cut.batch + cut.repeated
    order = [names.index(name) for name in apart + cut.member_axes]
    return numbers.transpose(order).reshape(math.prod(mesh[x] for x in apart), -1)


def exchanged(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sends `x[i]` to device `i` along the axes; returns what each sent here."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True) if axes else x


def joined(blocks: jax.Array, owned: OwnedStack, mesh: Mapping[Any, int]) -> jax.Array:
    """Joins blocks from devices, `(devices, count, *block)`, to `(count, *matrix)`."""
    shape, order = _factors(blocks.shape[1], owned.cut, mesh)
    ordered = [n for _, n in sorted(zip(order, shape, strict=True))]
    return blocks.reshape(ordered).transpose(order).reshape(-1, *owned.cut.shape)


def parted(
    matrices: jax.Array, owned: OwnedStack, mesh: Mapping[Any, int]
) -> jax.Array:
    """The inverse of `joined`."""
    shape, order = _factors(len(matrices), owned.cut, mesh)
    x = matrices.reshape(shape).transpose(np.argsort(order))
    return x.reshape(-1, len(matrices), *owned.block)


def _factors(
    count: int, cut: Cut, mesh: Mapping[Any, int]
) -> tuple[list[int], list[int]]:
    """Returns the axes of `(count, *matrix)` as factors, and their places in blocks.

    A factor is split into its devices times a block. In blocks devices come first, in
    the order of the mesh, and then the matrices.
    """
    n = len(cut.sharded)
    shape, order = [count], [n]
    for i, (size, names) in enumerate(cut.factors):
        peers = [mesh[name] for name in names]
        shape += [*peers, size // math.prod(peers)]
        order += [*map(cut.sharded.index, names), n + 1 + i]
    return shape, order


class Work(NamedTuple):
    """The matrices of a stack, which are to get owners.

    - `matrices`: how many each group of devices has to iterate.
    - `cost`: of each.
    - `entries`: of each.
    - `groups`: numbers of devices `(groups, members)`; every group does alike.
    """

    matrices: int
    cost: float
    entries: int
    groups: np.ndarray


def assign_owners(stacks: Sequence[Work], devices: int) -> list[np.ndarray]:
    """Gives each matrix, the most expensive first, to the least loaded device.

    Returns, for each stack, how many each member has. Members take matrices in order,
    so the counts say which.
    """
    # Longest processing time first (Graham, 1969): no device does more than one matrix
    # above the mean, if all may take all.
    # Ties go to the member that is first in its group, by the stack with most groups.
    # All groups then end with equal loads.
    finest = max((stack.groups for stack in stacks), key=len)
    rank = np.empty(devices)
    rank[finest.T.reshape(-1)] = np.arange(devices)
    # An all-to-all sends every device as much as the one that gets most. So a device
    # gets at most the mean and one matrix; else matrices with a short side, which are
    # cheap for their bytes, would collect on one device. If all may take all, one
    # device has the mean or less, and room.
    most = (
        max(stack.entries for stack in stacks)
        + sum(stack.matrices * stack.entries * len(stack.groups) for stack in stacks)
        / devices
    )
    loads, sent, counts_of_stack = np.zeros(devices), np.zeros(devices), {}
    for i in by_cost([stack.cost for stack in stacks]):
        count, cost, entries, groups = stacks[i]
        order = rank[groups].min(axis=0)
        taken = np.zeros(groups.shape[1], np.int32)
        for _ in range(count):
            is_full = sent[groups].max(axis=0) + entries > most
            busy = loads[groups].max(axis=0)
            chosen = int(np.lexsort((order, busy, is_full))[0])
            taken[chosen] += 1
            loads[groups[:, chosen]] += float(cost)
            sent[groups[:, chosen]] += entries
        counts_of_stack[i] = taken
    return [counts_of_stack[i] for i in range(len(stacks))]


def by_cost(costs: Sequence[float]) -> list[int]:
    """Returns indices, the most expensive first."""
    return sorted(range(len(costs)), key=lambda i: -costs[i])

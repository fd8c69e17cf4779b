"""A stack's way from blocks to whole matrices at the devices that iterate them.

The matrices of a stack are in slots, those of one device after those of another:

    (count, *block) -> padded to slots -> all_to_all -> (slots of this device, *matrix),
    and the same backwards

Matrices are iterated whole. To cut one over devices would take an exchange for every
product, where to send it to one takes two in all.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._axes import gather_everywhere
from .._layout.shardings import blocks_along, mesh_axes
from .._matrices.stacks import MatrixView


#: The most slots of a device, over the least that would do: every device sends as much
#: to each other, so for one that took many all would send padding.
MOST_SLOTS = 2

#: The most owners whose blocks are copied run by run: slices of known bounds, which a
#: TPU copies in 15 % fewer cycles than it gathers, but one for each owner.
MOST_RUNS = 16


class Cut(NamedTuple):
    """How a mesh cuts the matrices of a leaf.

    - `factors`: of the inputs and then of the outputs, the size and the mesh axes that
        cut it, the major one first. Most sides are one factor.
    - `shape`: of a matrix.
    - `batch`: along these mesh axes devices hold different matrices.
    - `replicated`: along these they hold the same.
    """

    factors: tuple[tuple[int, tuple[str, ...]], ...]
    shape: tuple[int, int]
    batch: tuple[str, ...]
    replicated: tuple[str, ...]

    @property
    def sharded(self) -> tuple[str, ...]:
        """Along these devices hold blocks of the same matrix."""
        return tuple(name for _, names in self.factors for name in names)

    @property
    def members(self) -> tuple[str, ...]:
        """The axes along which devices share out the matrices."""
        return self.replicated + self.sharded


class Slots(NamedTuple):
    """Which slots the matrices of a stack are in, and so which device has them."""

    first: int  # slot of the first matrix, where they are in a row
    counts: np.ndarray  # matrices of each device
    slots: int  # of each device

    @property
    def padding(self) -> tuple[int, int]:
        """Empty slots before the matrices and after them."""
        after = len(self.counts) * self.slots - self.first - int(self.counts.sum())
        return self.first, after

    @property
    def is_full(self) -> bool:
        return bool((self.counts == self.slots).all())

    def to_slots(self, x: jax.Array) -> jax.Array:
        """The matrices in their slots; in an empty one is any."""
        if self.is_full:
            return x
        starts = np.cumsum(self.counts) - self.counts
        if len(self.counts) > MOST_RUNS:
            # After the last matrix there is none to put into a slot.
            found = starts[:, None] + np.arange(self.slots)
            return jnp.take(x, np.minimum(found, len(x) - 1).reshape(-1), axis=0)
        x = jnp.pad(x, [(0, self.slots), (0, 0), (0, 0)])
        return jnp.concatenate([x[i : i + self.slots] for i in starts])

    def from_slots(self, x: jax.Array) -> jax.Array:
        if self.is_full:
            return x
        if len(self.counts) > MOST_RUNS:
            filled = np.flatnonzero(np.arange(self.slots) < self.counts[:, None])
            return jnp.take(x, filled, axis=0)
        runs = ((i * self.slots, n) for i, n in enumerate(self.counts))
        return jnp.concatenate([x[i : i + n] for i, n in runs if n])

    def count_at(self, member: jax.Array | int) -> jax.Array | None:
        """The matrices of a device, its first ones; `None` if all slots are full."""
        return None if self.is_full else jnp.asarray(self.counts)[member]


def cut_of(view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]) -> Cut:
    """`mesh` maps names of axes to sizes."""
    entries = [*spec, *[None] * (len(view.shape) - len(spec))]
    # Axes of one device cut nothing. Without them leaves that are cut alike have equal
    # cuts, and share a stack.
    names = [tuple(n for n in mesh_axes(e) if mesh[n] > 1) for e in entries]

    def factors(axes: Sequence[int]) -> list[tuple[int, tuple[str, ...]]]:
        found: list[tuple[int, tuple[str, ...]]] = []
        for axis in axes:
            size, cut = view.shape[axis], names[axis]
            # What follows a cut axis whole is one axis with it.
            if found and not cut:
                size, cut = found[-1][0] * size, found.pop()[1]
            found.append((size, cut))
        return found

    inner = (*factors(view.reduction), *factors(view.output))
    batch = {name for axis in view.batch for name in names[axis]}
    used = batch | {name for _, cut in inner for name in cut}
    axes = [name for name, size in mesh.items() if size > 1]
    return Cut(
        inner,
        view.matrix_shape,
        tuple(name for name in axes if name in batch),
        tuple(name for name in axes if name not in used),
    )


def local_view(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[str, int]
) -> MatrixView:
    """The view of what one device holds of the leaf."""
    shape = (size // n for size, n in blocks_along(view.shape, spec, mesh))
    return dataclasses.replace(view, shape=tuple(shape))


def to_owners(blocks: jax.Array, cut: Cut, share: Slots) -> jax.Array:
    """This device's blocks `(count, rows, columns)` to its share of whole matrices."""
    x = share.to_slots(blocks)
    if cut.replicated:
        # Copies hold the same blocks, and each sends its part of the slots alone.
        x = x.reshape(jax.lax.axis_size(cut.replicated), -1, *x.shape[1:])
        copy = jax.lax.axis_index(cut.replicated)
        x = jax.lax.dynamic_index_in_dim(x, copy, keepdims=False)
    x = _all_to_all(x, cut)
    # From (device along each factor, slots, block of each factor): side by side
    # the devices along a factor and its blocks are it again.
    sides = _sides(cut)
    x = x.reshape(*(n for n, _ in sides), share.slots, *(size for _, size in sides))
    return x.transpose(_joined(len(sides))).reshape(share.slots, *cut.shape)


def to_blocks(matrices: jax.Array, cut: Cut, share: Slots) -> jax.Array:
    """The inverse of `to_owners`, on every device that has blocks of a matrix."""
    sides = _sides(cut)
    order = np.argsort(_joined(len(sides)))
    x = matrices.reshape(share.slots, *itertools.chain(*sides)).transpose(order)
    x = x.reshape(-1, *(size for _, size in sides))
    x = _all_to_all(x, cut)
    if cut.replicated:
        x = gather_everywhere(x, cut.replicated, axis=0, tiled=True)
    return share.from_slots(x)


def _all_to_all(x: jax.Array, cut: Cut) -> jax.Array:
    """Sends the slots of every device to it."""
    if not cut.sharded:
        return x
    n = math.prod(map(jax.lax.axis_size, cut.sharded))
    sent = x.reshape(n, -1, *x.shape[1:])
    return jax.lax.all_to_all(sent, cut.sharded, 0, 0, tiled=True).reshape(x.shape)


def _sides(cut: Cut) -> list[tuple[int, int]]:
    """Along each factor the number of devices, and the size of a block."""
    counts = ((size, jax.lax.axis_size(names)) for size, names in cut.factors)
    return [(count, size // count) for size, count in counts]


def _joined(factors: int) -> list[int]:
    """The order in which blocks are matrices: slots, then each factor's two axes."""
    pairs = ((i, factors + 1 + i) for i in range(factors))
    return [factors, *itertools.chain(*pairs)]


def share_out(
    stacks: Sequence[tuple[int, float, np.ndarray]], devices: int
) -> list[Slots]:
    """Gives each matrix, the most expensive first, to the least loaded device.

    A stack has a number of matrices, the cost of each, and numbers of devices `(groups,
    members)`: those of a group share out its matrices, and every group does so alike.
    """
    # Longest processing time first (Graham, 1969): no device does more than one matrix
    # above the mean, if all may take all.
    # Ties go to devices at one place of all the groups of the stack that has most: the
    # groups share out alike, so what is not in all of them counts as if it were.
    finest = max((groups for *_, groups in stacks), key=len)
    rank = np.empty(devices)
    rank[finest.T.reshape(-1)] = np.arange(devices)
    loads, found = np.zeros(devices), {}
    for i in _most_expensive_first(stacks):
        count, cost, members = stacks[i]
        order = rank[members].min(axis=0)
        taken = np.zeros(members.shape[1], np.int32)
        most = MOST_SLOTS * math.ceil(count / len(taken))
        for _ in range(count):
            busy = np.where(taken < most, loads[members].max(axis=0), np.inf)
            chosen = int(np.lexsort((order, busy))[0])
            taken[chosen] += 1
            loads[members[:, chosen]] += float(cost)
        found[i] = Slots(0, taken, max(1, int(taken.max(initial=1))))
    return [found[i] for i in range(len(stacks))]


def _most_expensive_first(stacks: Sequence[tuple[Any, ...]]) -> list[int]:
    return sorted(range(len(stacks)), key=lambda i: -stacks[i][1])


def share_in_a_row(stacks: Sequence[tuple[int, float]], devices: int) -> list[Slots]:
    """Shares matrices out in a row, for arrays that XLA shards.

    To put them in any other order would be a gather, which it does not partition well.
    """
    loads, found = np.zeros(devices), {}
    for i in _most_expensive_first(stacks):
        count, cost = stacks[i]
        # Few devices with full slots, or more of them with half as many: the second is
        # better where the first stacks have left some devices nothing to do.
        least = max(1, math.ceil(count / devices))
        shares = [
            _where_least_busy(loads, count, slots)
            for slots in (least, MOST_SLOTS * least)
        ]
        after = [loads + float(cost) * share.counts for share in shares]
        best = int(np.argmin([x.max() for x in after]))
        found[i], loads = shares[best], after[best]
    return [found[i] for i in range(len(stacks))]


def _where_least_busy(loads: np.ndarray, count: int, slots: int) -> Slots:
    # Devices with full slots in a row, of which the busiest counts: all of them are
    # done when it is.
    used = max(1, math.ceil(count / slots))
    busiest = np.lib.stride_tricks.sliding_window_view(loads, used).max(axis=1)
    start = int(np.argmin(busiest))
    counts = np.zeros(len(loads), np.int32)
    counts[start : start + used] = slots
    counts[start + used - 1] = count - (used - 1) * slots  # the last has what is left
    return Slots(start * slots, counts, slots)


def groups_of(cut: Cut, mesh: Mapping[str, int]) -> np.ndarray:
    """Numbers of the devices in the mesh, as `(groups, members)`."""
    names = [name for name, size in mesh.items() if size > 1]
    # As `axis_index` over all axes numbers them: the first axis is the major one.
    numbers = np.arange(math.prod(mesh.values())).reshape([mesh[n] for n in names])
    order = [names.index(name) for name in cut.batch + cut.members]
    return numbers.transpose(order).reshape(
        math.prod(mesh[name] for name in cut.batch), -1
    )

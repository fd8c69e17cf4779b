"""Orthogonalization on a mesh of leaves whose sharding only the compiler knows.

Under automatic axes a program is traced without the shardings of its arguments. Stacks
are constrained such that every device holds whole matrices, which it iterates, and
they come back. How blocks are sent there and back, XLA decides.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._axes import keep_sharding, sharded_like
from .._matrices.pieces import divide
from .._matrices.stacks import Matrices, plan_stacks, Stack
from .._newton_schulz.solver import Solver
from .on_mesh import together
from .owners import by_cost


ANY = PartitionSpec.UNCONSTRAINED

#: From how many matrices for each device on a leaf has a stack of its own, of which the
#: last slot of each device may be padding: at most a fifth of the work.
MANY = 4


class Slots(NamedTuple):
    """Which slots the matrices of a stack are in, in a row, and so whose they are."""

    first: int  # slot of the first matrix
    counts: np.ndarray  # matrices of each device
    slots: int  # of each device

    @property
    def padding(self) -> tuple[int, int]:
        """Empty slots before the matrices and after them."""
        after = len(self.counts) * self.slots - self.first - int(self.counts.sum())
        return self.first, after


#: A stack, and which of its matrices each device iterates.
DividedStack = tuple[Stack, Slots]


def orthogonalize_by_constraint(
    solver: Solver, leaves: Sequence[Matrices], mesh: Mesh | AbstractMesh
) -> list[jax.Array]:
    """Orthogonalizes leaves that the automatic axes of `mesh` shard, somehow."""
    pieces, unite = divide([leaf.of(keep_sharding(leaf.array)) for leaf in leaves])
    plan = divide_stacks(solver, pieces, mesh.size)
    axes = tuple(name for name, size in mesh.shape.items() if size > 1)

    def constrained(x: jax.Array, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(x, sharding)

    def halfway(slots: jax.Array) -> jax.Array:
        # Over all axes but the last one, since XLA moves one axis well. Where all of
        # them cut matrices it would make copies of the stack on all devices in order to
        # move them together, and stacks that it moves before they are padded it would
        # move again.
        return constrained(slots, axes[:-1] or None, ANY, ANY)

    def iterate_own(solver: Solver, slots: Sequence[jax.Array]) -> list[jax.Array]:
        device = jax.lax.axis_index(axes)
        late = [True] * len(plan)
        iterated = []
        for i, ((_, share), x) in enumerate(zip(plan, together(slots, late), strict=True)):
            # A name by which benchmarks know its loop.
            with jax.named_scope(f"stack{i}"):
                count = jnp.asarray(share.counts)[device]
                iterated.append(solver.orthogonalize_all(x, count))
        return together(iterated, late)

    arrived = []
    for stack, share in plan:
        matrices = jnp.concatenate(stack.gather(solver.wire_dtype(stack.dtype)))
        slots = jnp.pad(matrices, [share.padding, (0, 0), (0, 0)])
        arrived.append(constrained(halfway(slots), axes, None, None))
    by_device = PartitionSpec(axes)
    # Each device iterates what a constraint has put there. `check_vma` would have to
    # know that a loop with a count of its own differs along all axes.
    iterated = jax.shard_map(
        iterate_own,
        mesh=mesh,
        in_specs=(PartitionSpec(), by_device),
        out_specs=by_device,
        check_vma=False,
    )(solver, arrived)
    results: list[Any] = list(pieces)
    for (stack, share), slots in zip(plan, iterated, strict=True):
        slots = constrained(halfway(slots), None, ANY, ANY)
        stack.scatter(slots[share.first : share.first + stack.count], results)
    results = [x.astype(np.promote_types(x.dtype, jnp.float32)) for x in results]
    return [*map(sharded_like, unite(results), (leaf.array for leaf in leaves))]


def divide_stacks(
    solver: Solver, leaves: Sequence[Matrices], devices: int
) -> list[DividedStack]:
    """Groups matrices into stacks, and divides each among the devices.

    Tall ones are not turned, since a mesh often cuts all leaves along one axis. A leaf
    of many has a stack of its own: it may be cut along them. XLA copies arrays that are
    sharded differently to all devices before it concatenates them.
    """
    # Experts, which a mesh may cut, before layers, which it seldom does: a cut axis in
    # front stays cut when both become one.
    few, many = [], []
    for i, leaf in enumerate(leaves):
        view = dataclasses.replace(leaf.view, batch=leaf.view.batch[::-1])
        group = many if view.count >= MANY * devices else few
        group.append((i, dataclasses.replace(leaf, view=view)))
    stacks = plan_stacks(few) + [stack for x in many for stack in plan_stacks([x])]
    work = [(stack.count, solver.cost(stack.shape, stack.dtype)) for stack in stacks]
    return [*zip(stacks, share_in_a_row(work, devices), strict=True)]


def share_in_a_row(stacks: Sequence[tuple[int, float]], devices: int) -> list[Slots]:
    """Shares matrices out in a row, for arrays that XLA shards.

    To put them in any other order would be a gather, which it does not partition well.
    """
    loads, found = np.zeros(devices), {}
    for i in by_cost([cost for _, cost in stacks]):
        count, cost = stacks[i]
        # Few devices with full slots, or more of them with half as many: the second is
        # better where the first stacks have left some devices nothing to do.
        least = max(1, math.ceil(count / devices))
        shares = [
            _where_least_busy(loads, count, slots)
            for slots in (least, 2 * least)
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



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

from .._layout.layout import AxisNames
from .._matrices.pieces import divide
from .._matrices.stacks import MatrixLeaf, MatrixView, Part, plan_stacks, Stack
from .._mesh_axes import impose_no_sharding, keep_sharding, sharded_like
from .._newton_schulz.solver import Solver
from .on_mesh import wait_for_all
from .owners import by_cost


ANY = PartitionSpec.UNCONSTRAINED

#: From how many matrices for each device on a leaf has a stack of its own, of which the
#: last slot of each device may be padding: at most a fifth of the work.
MANY = 4


class Slots(NamedTuple):
    """The matrices of a stack are in consecutive slots; each device has some slots.

    Device `i` iterates what is in slots `i * slots` to `(i + 1) * slots`.
    """

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
    solver: Solver,
    leaves: Sequence[MatrixLeaf],
    mesh: Mesh | AbstractMesh,
    slow: AxisNames = (),
) -> list[jax.Array]:
    """Orthogonalizes leaves that the automatic axes of `mesh` shard, somehow."""
    pieces, unite = divide([leaf.of(keep_sharding(leaf.array)) for leaf in leaves])
    # Along slow axes XLA is asked for copies.
    sizes = {x: n for x, n in mesh.shape.items() if n > 1 and x not in slow}
    axes, devices = tuple(sizes), math.prod(sizes.values())
    plan = divide_stacks(solver, pieces, devices)

    def constrained(x: jax.Array, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(x, sharding)

    def halfway(slots: jax.Array) -> jax.Array:
        # Over all axes but the last one, since XLA moves one axis well. Where all of
        # them cut matrices it would make copies of the stack on all devices in order to
        # move them together.
        return constrained(slots, axes[:-1], ANY, ANY) if len(axes) > 1 else slots

    def iterate_own(solver: Solver, slots: Sequence[jax.Array]) -> list[jax.Array]:
        device = jax.lax.axis_index(axes) if axes else 0
        late = [()] * len(plan)
        iterated = []
        for i, ((_, share), x) in enumerate(
            zip(plan, wait_for_all(slots, late), strict=True)
        ):
            # A name by which benchmarks know its loop.
            with jax.named_scope(f"stack{i}"):
                count = jnp.asarray(share.counts)[device]
                iterated.append(solver.orthogonalize_all(x, count))
        return wait_for_all(iterated, late)

    arrived = []
    for stack, share in plan:
        matrices = stack.gather(solver.wire_dtype(stack.dtype))
        if _is_even(stack, devices):
            slots = _side_by_side(matrices, devices)
        else:
            # Stacks that XLA moves before they are padded it would move again.
            slots = jnp.concatenate(matrices)
            slots = jnp.pad(slots, [share.padding, (0, 0), (0, 0)])
            slots = constrained(slots, axes[:-1] or None, ANY, ANY)
        arrived.append(constrained(halfway(slots), axes or None, None, None))
    by_device = PartitionSpec(axes or None)
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
        slots = halfway(slots)
        if _is_even(stack, devices):
            _apart(slots, devices, stack, results)
        else:
            slots = constrained(slots, None, ANY, ANY)
            stack.scatter(slots[share.first : share.first + stack.count], results)
    results = [x.astype(np.promote_types(x.dtype, jnp.float32)) for x in results]
    # Where the owners have them does not decide how they are sharded: their leaf does.
    whole = map(impose_no_sharding, unite(results))
    return [*map(sharded_like, whole, (leaf.array for leaf in leaves))]


def _is_even(stack: Stack, devices: int) -> bool:
    """Whether every device has as many matrices of each leaf."""
    return not any(count % devices for count in stack.counts)


def _side_by_side(leaves: Sequence[jax.Array], devices: int) -> jax.Array:
    """Stacks of one size as one, of which each device has the same part of each.

    A stack that the mesh cuts along its matrices stays where it is.
    """
    parts = [x.reshape(devices, -1, *x.shape[1:]) for x in leaves]
    return jnp.stack(parts, axis=1).reshape(-1, *leaves[0].shape[1:])


def _apart(slots: jax.Array, devices: int, stack: Stack, results: list[Any]) -> None:
    """Puts the leaves of what `_side_by_side` has put together into `results`."""
    parts = slots.reshape(devices, len(stack.parts), -1, *stack.shape)
    for at, (i, leaf) in enumerate(stack.parts):
        x = parts[:, at].reshape(-1, *stack.shape)
        results[i] = leaf.view.from_matrices(x)


def divide_stacks(
    solver: Solver, leaves: Sequence[MatrixLeaf], devices: int
) -> list[DividedStack]:
    """Groups matrices into stacks, and divides each among the devices.

    Tall ones are not turned, since a mesh often cuts all leaves along one axis. Leaves
    that the devices share out evenly, and leaves of many matrices, may be cut along
    them: the first have a stack of those that are alike, and are cut alike, the others
    one of their own. XLA copies arrays that are sharded differently to all devices
    before it concatenates them.
    """
    few: list[Part] = []
    alone: dict[Any, list[Part]] = {}
    for i, leaf in enumerate(leaves):
        view = leaf.view

        def is_uneven(axis: int, view: MatrixView = view) -> bool:
            return view.shape[axis] % devices > 0

        # The axis that a mesh may cut goes in front: it stays cut when all become one.
        # Experts are after layers, which a mesh seldom cuts.
        batch = sorted(sorted(view.batch, reverse=True), key=is_uneven)
        view = dataclasses.replace(view, batch=tuple(batch))
        part = i, dataclasses.replace(leaf, view=view)
        if view.count % devices == 0:
            alone.setdefault(view, []).append(part)
        elif view.count >= MANY * devices:
            alone[i] = [part]
        else:
            few.append(part)
    stacks = [x for parts in [few, *alone.values()] for x in plan_stacks(parts)]
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
        least = math.ceil(count / devices)
        shares = [_where_least_busy(loads, count, least)]
        # Even stacks may be where they have to be.
        if count % devices:
            shares.append(_where_least_busy(loads, count, 2 * least))
        after = [loads + float(cost) * share.counts for share in shares]
        best = int(np.argmin([x.max() for x in after]))
        found[i], loads = shares[best], after[best]
    return [found[i] for i in range(len(stacks))]


def _where_least_busy(loads: np.ndarray, count: int, slots: int) -> Slots:
    # Devices with full slots in a row, of which the busiest counts: all of them are
    # done when it is.
    used = math.ceil(count / slots)
    busiest = np.lib.stride_tricks.sliding_window_view(loads, used).max(axis=1)
    start = int(np.argmin(busiest))
    counts = np.zeros(len(loads), np.int32)
    counts[start : start + used] = slots
    counts[start + used - 1] = count - (used - 1) * slots  # the last has what is left
    return Slots(start * slots, counts, slots)

"""Orthogonalization on a mesh of leaves whose sharding only the compiler knows.

Under automatic axes a program is traced without the shardings of its arguments. A
constraint on each stack gives every device whole matrices, and another on the results
gives them back. XLA decides how to send them.
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

#: A leaf with at least this many matrices per device has a stack of its own, in which a
#: slot of each device may be padding: at most a fifth of the work.
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
    """Orthogonalizes leaves that the automatic axes of `mesh` shard in unknown ways."""
    pieces, unite = divide([x.with_array(keep_sharding(x.array)) for x in leaves])
    # Along slow axes XLA is asked for copies.
    sizes = {x: n for x, n in mesh.shape.items() if n > 1 and x not in slow}
    axes, devices = tuple(sizes), math.prod(sizes.values())
    plan = divide_stacks(solver, pieces, devices)

    def constrained(x: jax.Array, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(x, sharding)

    def halfway(slots: jax.Array) -> jax.Array:
        # Sharded over all axes but the last, since XLA moves one axis well. To move
        # several that cut matrices, it would first copy the stack to all devices.
        return constrained(slots, axes[:-1], ANY, ANY) if len(axes) > 1 else slots

    def iterate_own(solver: Solver, slots: Sequence[jax.Array]) -> list[jax.Array]:
        device = jax.lax.axis_index(axes) if axes else 0
        barriers = [()] * len(plan)
        iterated = []
        for i, ((_, assigned), x) in enumerate(
            zip(plan, wait_for_all(slots, barriers), strict=True)
        ):
            # A name by which benchmarks know its loop.
            with jax.named_scope(f"stack{i}"):
                count = jnp.asarray(assigned.counts)[device]
                iterated.append(solver.orthogonalize_all(x, count))
        return wait_for_all(iterated, barriers)

    arrived = []
    for stack, assigned in plan:
        matrices = stack.gather(solver.wire_dtype(stack.dtype))
        if _is_even(stack, devices):
            slots = _side_by_side(matrices, devices)
        else:
            slots = jnp.concatenate(matrices)
            slots = jnp.pad(slots, [assigned.padding, (0, 0), (0, 0)])
            # Without this constraint XLA would move the stack before the padding, too.
            slots = constrained(slots, axes[:-1] or None, ANY, ANY)
        arrived.append(constrained(halfway(slots), axes or None, None, None))
    by_device = PartitionSpec(axes or None)
    # `check_vma` does not know that a loop whose count differs by device has results
    # that differ along all axes.
    iterated = jax.shard_map(
        iterate_own,
        mesh=mesh,
        in_specs=(PartitionSpec(), by_device),
        out_specs=by_device,
        check_vma=False,
    )(solver, arrived)
    results: list[Any] = list(pieces)
    for (stack, assigned), slots in zip(plan, iterated, strict=True):
        slots = halfway(slots)
        if _is_even(stack, devices):
            _apart(slots, devices, stack, results)
        else:
            slots = constrained(slots, None, ANY, ANY)
            stack.scatter(slots[assigned.first : assigned.first + stack.count], results)
    results = [x.astype(np.promote_types(x.dtype, jnp.float32)) for x in results]
    # The results are sharded as their leaf is, not as their owners were.
    whole = map(impose_no_sharding, unite(results))
    return [*map(sharded_like, whole, (leaf.array for leaf in leaves))]


def _is_even(stack: Stack, devices: int) -> bool:
    """Whether devices divide the matrices of each leaf evenly."""
    return not any(count % devices for count in stack.counts)


def _side_by_side(leaves: Sequence[jax.Array], devices: int) -> jax.Array:
    """Joins stacks of one size, so that each device has the same part of each.

    A stack that the mesh cuts along its matrices is not moved.
    """
    parts = [x.reshape(devices, -1, *x.shape[1:]) for x in leaves]
    return jnp.stack(parts, axis=1).reshape(-1, *leaves[0].shape[1:])


def _apart(slots: jax.Array, devices: int, stack: Stack, results: list[Any]) -> None:
    """The inverse of `_side_by_side`: puts the leaves into `results`."""
    parts = slots.reshape(devices, len(stack.parts), -1, *stack.shape)
    for place, (i, leaf) in enumerate(stack.parts):
        x = parts[:, place].reshape(-1, *stack.shape)
        results[i] = leaf.view.from_matrices(x)


def divide_stacks(
    solver: Solver, leaves: Sequence[MatrixLeaf], devices: int
) -> list[DividedStack]:
    """Groups matrices into stacks, and divides each among the devices.

    Tall matrices are not turned, since a mesh often cuts all leaves along one axis.
    XLA copies arrays that are sharded differently to all devices before it concatenates
    them. So leaves that devices divide evenly share a stack only with leaves of the
    same view, which are cut alike, and a leaf of many matrices has a stack of its own.
    """
    few: list[Part] = []
    alone: dict[Any, list[Part]] = {}
    for i, leaf in enumerate(leaves):
        view = leaf.view

        def is_uneven(axis: int, view: MatrixView = view) -> bool:
            return view.shape[axis] % devices > 0

        # An axis that a mesh may cut goes first, and stays cut when all are merged: of
        # layers and experts the later, since a mesh seldom cuts layers.
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
    return [*zip(stacks, assign_slots(work, devices), strict=True)]


def assign_slots(stacks: Sequence[tuple[int, float]], devices: int) -> list[Slots]:
    """Assigns consecutive matrices to devices, for arrays that XLA shards.

    Any other order would need a gather, which XLA does not partition well.
    """
    loads, slots_of_stack = np.zeros(devices), {}
    for i in by_cost([cost for _, cost in stacks]):
        count, cost = stacks[i]
        # As few slots as hold all, or twice as many on half of the devices, which is
        # better if other stacks have left these nothing to do.
        least = math.ceil(count / devices)
        candidates = [_where_least_busy(loads, count, least)]
        # A stack that divides evenly may already be sharded so.
        if count % devices:
            candidates.append(_where_least_busy(loads, count, 2 * least))
        loads_after = [loads + float(cost) * slots.counts for slots in candidates]
        best = int(np.argmin([x.max() for x in loads_after]))
        slots_of_stack[i], loads = candidates[best], loads_after[best]
    return [slots_of_stack[i] for i in range(len(stacks))]


def _where_least_busy(loads: np.ndarray, count: int, slots: int) -> Slots:
    # The busiest of some consecutive devices is done last.
    used = math.ceil(count / slots)
    busiest = np.lib.stride_tricks.sliding_window_view(loads, used).max(axis=1)
    start = int(np.argmin(busiest))
    counts = np.zeros(len(loads), np.int32)
    counts[start : start + used] = slots
    counts[start + used - 1] = count - (used - 1) * slots  # the last has the remainder
    return Slots(start * slots, counts, slots)

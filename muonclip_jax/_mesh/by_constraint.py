"""Orthogonalization on a mesh of leaves whose sharding only the compiler knows.

Under automatic axes a program is traced without the shardings of its arguments. Stacks
are constrained such that every device holds whole matrices, which it iterates, and
they come back. How blocks are sent there and back, XLA decides.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._axes import keep_sharding, sharded_like
from .._matrices.pieces import divide
from .._matrices.stacks import Matrices, plan_stacks, Stack
from .._newton_schulz.solver import Solver
from .exchange import share_in_a_row, Slots
from .on_mesh import iterate_share


ANY = PartitionSpec.UNCONSTRAINED

#: From how many matrices for each device on a leaf has a stack of its own, of which the
#: last slot of each device may be padding: at most a fifth of the work.
MANY = 4


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
        counts = [jnp.asarray(share.counts)[device] for _, share in plan]
        return iterate_share(solver, [*zip(slots, counts, strict=True)])

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

"""Orthogonalization on a mesh of leaves whose sharding only the compiler knows.

Under automatic axes a program is traced without the shardings of its arguments. Stacks
are constrained such that every device holds whole matrices, which it iterates, and
they come back. How blocks are sent there and back, XLA decides.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._axes import keep_sharding, sharded_like
from .._matrices.pieces import divide
from .._matrices.stacks import MatrixView, plan_stacks, Stack
from .._newton_schulz.solver import Solver
from .exchange import Share, share_in_a_row
from .on_mesh import iterate_share


ANY = PartitionSpec.UNCONSTRAINED

#: From how many matrices for each device on a leaf has a stack of its own, of which the
#: last slot of each device may be padding: at most a fifth of the work.
MANY = 4


#: A stack, and which of its matrices each device iterates.
DividedStack = tuple[Stack, Share]


def orthogonalize_by_constraint(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mesh | AbstractMesh,
) -> list[jax.Array]:
    """Orthogonalizes leaves that the automatic axes of `mesh` shard, somehow."""
    given = leaves
    pieces = divide([keep_sharding(x) for x in leaves], views)
    leaves, views = pieces.arrays, pieces.views
    stacks = stacks_of(leaves, views, mesh.size)
    axes = tuple(name for name, size in mesh.shape.items() if size > 1)
    plan = divide_stacks(solver, stacks, mesh.size)
    by_device = PartitionSpec(axes)
    # Each device iterates what a constraint has put there. `check_vma` would have to
    # know that a loop with a count of its own differs along all axes.
    iterated = jax.shard_map(
        functools.partial(_iterate_own, plan=plan, axes=axes),
        mesh=mesh,
        in_specs=(PartitionSpec(), by_device),
        out_specs=by_device,
        check_vma=False,
    )(solver, [_to_devices(solver, leaves, each, mesh, axes) for each in plan])
    results = list(leaves)
    for each, matrices in zip(plan, iterated, strict=True):
        returned = _from_devices(matrices, each, mesh, axes)
        each[0].scatter(returned, results)
    results = [x.astype(np.promote_types(x.dtype, jnp.float32)) for x in results]
    return [*map(sharded_like, pieces.unite(results), given)]


def stacks_of(
    leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
    views: Sequence[MatrixView],
    devices: int,
) -> list[Stack]:
    """Groups matrices into stacks.

    Tall ones are not turned, since a mesh often cuts all leaves along one axis. A leaf
    of many has a stack of its own: it may be cut along them. XLA copies arrays that are
    sharded differently to all devices before it concatenates them.
    """
    # Experts, which a mesh may cut, before layers, which it seldom does: a cut axis in
    # front stays cut when both become one.
    ordered = [dataclasses.replace(view, batch=view.batch[::-1]) for view in views]
    many = [i for i, view in enumerate(ordered) if view.count >= MANY * devices]
    few = [i for i in range(len(views)) if i not in many]

    def of(chosen: Sequence[int]) -> list[Stack]:
        found = [view if i in chosen else None for i, view in enumerate(ordered)]
        return plan_stacks(leaves, found)

    return of(few) + [stack for i in many for stack in of([i])]


def divide_stacks(
    solver: Solver, stacks: Sequence[Stack], devices: int
) -> list[DividedStack]:
    shares = share_in_a_row(
        [stack.count for stack in stacks],
        [solver.cost(stack.shape, jnp.dtype(stack.dtype)) for stack in stacks],
        devices,
    )
    return list(zip(stacks, shares, strict=True))


def _to_devices(solver, leaves, each: DividedStack, mesh, axes) -> jax.Array:
    stack, share = each
    wire = solver.wire_dtype(jnp.dtype(stack.dtype))
    matrices = stack.gather(leaves, wire)
    slots = jnp.pad(matrices, [share.padding, (0, 0), (0, 0)])
    return _constrained(_halfway(slots, mesh, axes), mesh, axes, None, None)


def _from_devices(slots: jax.Array, each: DividedStack, mesh, axes) -> jax.Array:
    (stack, share), slots = each, _halfway(slots, mesh, axes)
    slots = _constrained(slots, mesh, None, ANY, ANY)
    return slots[share.first : share.first + stack.count]


def _halfway(slots: jax.Array, mesh, axes) -> jax.Array:
    """Shards slots over all axes but the last one.

    XLA moves one axis well. Where all of them cut matrices it would make copies of the
    stack on all devices in order to move them together, and stacks that it moves before
    they are padded it would move again.
    """
    return _constrained(slots, mesh, axes[:-1] or None, ANY, ANY)


def _constrained(x: jax.Array, mesh: Mesh | AbstractMesh, *spec) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(x, sharding)


def _iterate_own(
    solver: Solver,
    slots: Sequence[jax.Array],
    *,
    plan: Sequence[DividedStack],
    axes: tuple[str, ...],
) -> list[jax.Array]:
    """The work of one device, which waits for no other in between."""
    device = jax.lax.axis_index(axes)
    counts = [jnp.asarray(share.counts)[device] for _, share in plan]
    return iterate_share(solver, slots, counts)

"""Orthogonalization on a mesh of leaves of which nobody knows how they lie.

Stacks are laid out such that every device holds whole matrices, which it iterates, and
they come back. How the blocks travel there and back, XLA decides.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._matrices.stacks import plan_stacks, Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .._newton_schulz.waiting import zero_after
from .consecutive import assign_consecutive, Consecutive
from .network import ANY_NETWORK, Network, work_and_bytes


ANY = PartitionSpec.UNCONSTRAINED

#: From how many matrices for each device on a leaf has a stack of its own.
MANY = 4


class DividedStack(NamedTuple):
    """A stack, and which of its matrices each device iterates."""

    stack: Stack
    share: Consecutive


def orthogonalize_by_constraint(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mesh | AbstractMesh,
    network: Network = ANY_NETWORK,
) -> list[jax.Array]:
    """Orthogonalizes leaves that lie on the automatic axes of `mesh`, somehow."""
    stacks = stacks_of(leaves, views, mesh.size)
    axes = _axes_that_share(solver, stacks, mesh.shape, network)
    plan = divide_stacks(solver, stacks, math.prod(mesh.shape[name] for name in axes))
    by_device = PartitionSpec(axes)
    iterated = jax.shard_map(
        functools.partial(_iterate_own, plan=plan, axes=axes),
        mesh=mesh,
        in_specs=(PartitionSpec(), by_device),
        out_specs=by_device,
        check_vma=False,
    )(solver, [_to_devices(solver, leaves, each, mesh, axes) for each in plan])
    results = list(leaves)
    on_cpu = solver.platform == "cpu"
    for each, matrices in zip(plan, iterated, strict=True):
        returned = _from_devices(matrices, each, mesh, axes)
        each.stack.scatter(returned, results, on_cpu=on_cpu)
    return results


def stacks_of(
    leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
    views: Sequence[MatrixView],
    devices: int,
) -> list[Stack]:
    """Apart are tall matrices, since often a mesh cuts all along one axis, and leaves
    of many matrices, which may be cut along their stack: to put together what lies
    differently, XLA would copy it to all devices.
    """
    ordered = [_last_stack_first(view) for view in views]
    many = [i for i, view in enumerate(ordered) if view.count >= MANY * devices]
    few = [i for i in range(len(views)) if i not in many]

    def of(chosen: Sequence[int]) -> list[Stack]:
        found = [view if i in chosen else None for i, view in enumerate(ordered)]
        return plan_stacks(leaves, found)

    return of(few) + [stack for i in many for stack in of([i])]


def divide_stacks(
    solver: Solver, stacks: Sequence[Stack], devices: int
) -> list[DividedStack]:
    shares = assign_consecutive(
        [stack.count for stack in stacks],
        [solver.cost(stack.shape, jnp.dtype(stack.dtype)) for stack in stacks],
        devices,
    )
    return [DividedStack(*each) for each in zip(stacks, shares, strict=True)]


def _axes_that_share(
    solver: Solver, stacks: Sequence[Stack], mesh: Mapping[str, int], network: Network
) -> tuple[str, ...]:
    """All that are longer than 1, or those along which nothing is repeated.

    Leaves are taken to lie whole along those, as they do in most programs.
    """
    works = [
        (stack.count, *work_and_bytes(solver, stack.shape, jnp.dtype(stack.dtype)))
        for stack in stacks
    ]
    flops = sum(count * flops for count, flops, _ in works)
    size = sum(count * size for count, _, size in works)
    repeated = network.axes if network.are_cheap(flops, size) else ()
    return tuple(n for n, size in mesh.items() if size > 1 and n not in repeated)


def _last_stack_first(view: MatrixView) -> MatrixView:
    """Experts, which a mesh may cut, in front of layers, which it seldom does.

    A cut axis in front stays cut when both become one.
    """
    return dataclasses.replace(view, batch=view.batch[::-1])


def _to_devices(solver, leaves, each: DividedStack, mesh, axes) -> jax.Array:
    stack, share = each
    wire = solver.wire_dtype(jnp.dtype(stack.dtype))
    matrices = stack.gather(
        leaves, lambda view, leaf: view.to_matrices(leaf).astype(wire)
    )
    slots = jnp.pad(matrices, [share.padding, (0, 0), (0, 0)])
    return _lay(_lay_halfway(slots, mesh, axes), mesh, axes, None, None)


def _from_devices(slots: jax.Array, each: DividedStack, mesh, axes) -> jax.Array:
    slots = _lay_halfway(slots, mesh, axes)
    first = each.share.first
    return _lay(slots, mesh, None, ANY, ANY)[first : first + each.stack.count]


def _lay_halfway(slots: jax.Array, mesh, axes) -> jax.Array:
    """Over all axes but the last one.

    XLA moves one axis well. Where all of them cut matrices it would make copies of the
    stack on all devices in order to move them together, and stacks that it moves before
    they are padded it would move again.
    """
    return _lay(slots, mesh, axes[:-1] or None, ANY, ANY)


def _lay(x: jax.Array, mesh: Mesh | AbstractMesh, *spec) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(x, sharding)


def _iterate_own(
    solver: Solver,
    slots: Sequence[jax.Array],
    *,
    plan: Sequence[DividedStack],
    axes: tuple[str, ...],
) -> list[jax.Array]:
    """What one device does in its slots; no device waits for another in between."""
    zero, iterated = zero_after(slots), []
    device = jax.lax.axis_index(axes)
    for number, ((stack, share), mine) in enumerate(zip(plan, slots, strict=True)):

        def orthogonalize(*batches: jax.Array, dtype: str = stack.dtype):
            return solver.orthogonalize(*[x.astype(dtype) for x in batches])

        # A name by which benchmarks know its loop.
        with jax.named_scope(f"stack{number}"):
            count = jnp.asarray(share.counts)[device]
            mine, zero = solver.map_first(orthogonalize, mine, count, zero)
        iterated.append(mine)
    return [mine + zero.astype(mine.dtype) for mine in iterated]

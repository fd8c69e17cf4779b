"""Orthogonalization by all devices of a mesh.

Blocks of leaves -> stacks and parcels, each at the device that owns its matrices ->
iterated there -> blocks. It takes two all-to-alls for all matrices that are not shared
out evenly, and two for each stack of the others.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._layout.layout import AxisNames, on_whole_blocks
from .._layout.shardings import along, blocks_along, but_along
from .._matrices.pieces import divide, pieces_of
from .._matrices.stacks import MatrixLeaf, MOST_LEAVES, Part, Stack, zero_after
from .._mesh_axes import is_checked, keep_sharding, resharded, varying
from .._newton_schulz.solver import Solver
from .owners import (
    assign_owners,
    Cut,
    cut_of,
    groups_of,
    local_view,
    OwnedStack,
    Work,
)
from .parcels import Parcels
from .stack_exchange import StackExchange


#: A leaf with at least this many entries per device gets an exchange of its own. Small
#: leaves together need fewer exchanges; large ones alone need no copy into a stack:
#: 41 % of the temporaries of Mixtral's update on 64 v5p, by the compiler.
LARGE_LEAF = 2**24


#: Stacks whose own exchange would send more than this, over the least, share one. Other
#: exchanges overlap with work on what has arrived: one for all would expose those of
#: Kimi K2, with 1.8 times the temporaries.
MOST_PADDING = 1.1

#: Sends some stacks to their owners and back.
Exchange = Parcels | StackExchange


def orthogonalize_on_mesh(
    solver: Solver,
    leaves: Sequence[MatrixLeaf],
    mesh: Mesh | AbstractMesh,
    slow: AxisNames = (),
) -> list[jax.Array]:
    """Orthogonalizes leaves that are sharded on `mesh`, and stay sharded so."""
    aligned = []
    for leaf in leaves:
        # Most leaves stay as they are. A fused kernel whose blocks show no piece is
        # gathered along its outputs, by XLA, and cut again.
        if (spec := _aligned(leaf, mesh.shape)) != leaf.spec:
            # The leaf itself is not moved: without Nesterov's step it is the state.
            x = _sharded(keep_sharding(leaf.array), mesh, spec)
            leaf = MatrixLeaf(x, leaf.view, spec)
        aligned.append(leaf)
    specs = [leaf.spec for leaf in aligned]

    def on_device(solver: Solver, leaves: list[MatrixLeaf]) -> list[jax.Array]:
        try:
            jax.lax.axis_size(tuple(mesh.axis_names))
        except NameError as error:
            raise ValueError(
                "jax.vmap maps over an axis that an explicit axis of the mesh shards, "
                "and devices along that axis cannot share Muon's work: map over an "
                "axis that is not sharded, or use jax.shard_map"
            ) from error
        return share_among_devices(solver, leaves, mesh.shape, slow)

    results = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), specs),
        out_specs=specs,
        check_vma=False,  # as in `orthogonalize_by_constraint`
    )(solver, aligned)
    return [
        x if leaf.spec == spec else _sharded(x, mesh, leaf.spec)
        for x, leaf, spec in zip(results, leaves, specs, strict=True)
    ]


def _aligned(leaf: MatrixLeaf, mesh: Mapping[Any, int]) -> PartitionSpec:
    """Returns the spec without the axes of the mesh that cut through pieces.

    Blocks of a fused query, key and value have entries of one or two of the three, so
    the outputs have to be gathered; blocks of whole groups or heads have pieces of
    their own.
    """
    if leaf.view.division is None:
        return leaf.spec
    pieces, through = pieces_of(leaf.view), set()
    for axis, (_, count) in enumerate(blocks_along(leaf.view.shape, leaf.spec, mesh)):
        sizes = (dict(zip(x.leaf_axes, x.view.shape, strict=True)) for x in pieces)
        if any(size.get(axis, 1) % count for size in sizes):
            through.add(axis)
    return but_along(through, leaf.spec)


def _sharded(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Returns the array, sharded as `spec` says."""
    explicit = jax.typeof(x).sharding.mesh.explicit_axes
    if not explicit:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    # Alongside explicit axes, automatic ones follow from what the array is used for.
    return resharded(x, along(explicit, spec))


def orthogonalize_by_replicas(
    solver: Solver, leaves: Sequence[MatrixLeaf], axes: AxisNames, slow: AxisNames = ()
) -> list[jax.Array]:
    """Orthogonalizes leaves that are the same along all axes that do not cut them.

    Each device along the axes of `pmap`, `shard_map` and `vmap` iterates its share of
    the matrices, and one gather for each stack returns all.
    """
    sizes = {name: jax.lax.axis_size(name) for name in axes}
    # Types have to say before the loop that devices iterate different matrices, of
    # leaves that are the same. Along an axis of one device, and along a slow one,
    # nothing differs, and no gather would make the types the same again.
    several = tuple(name for name in axes if sizes[name] > 1)
    shared = tuple(name for name in several if name not in slow)
    if shared and is_checked(shared):
        leaves = [leaf.with_array(varying(leaf.array, shared)) for leaf in leaves]
    return on_whole_blocks(
        lambda whole: share_among_devices(solver, whole, sizes, slow),
        leaves,
        kept=lambda leaf: along(several, _aligned(leaf, sizes)),
    )


def share_among_devices(
    solver: Solver,
    leaves: Sequence[MatrixLeaf],
    mesh: Mapping[Any, int],
    slow: AxisNames = (),
) -> list[jax.Array]:
    """Returns this device's blocks of the leaves, orthogonalized.

    `mesh` maps names of axes to sizes.
    """
    # Every process makes the same plan by itself: it follows from shapes, specs and
    # costs alone, in an order that no hash decides.
    pieces, unite = divide(leaves)
    plan, arrived = plan_exchanges(solver, pieces, mesh, slow), []
    for exchange in plan:
        # Matrices that are iterated in half precision are sent in it: half the traffic.
        stacks = [owned.stack for owned in exchange.stacks]
        arrived.append(exchange.arrive([x.gather(exchange.dtype) for x in stacks]))
    # Work is balanced over all stacks together, so an exchange between two stacks would
    # make every device wait for the slowest of each. So exchanges that are not even
    # have barriers: iteration starts once all have arrived, but for the first, which
    # hides the arrival of the others, and results are sent once all are iterated. Work
    # that is repeated along slow axes has a barrier of its own, since its type would
    # otherwise differ along them, too.
    barriers = [None if exchange.is_even else exchange.repeated for exchange in plan]
    ready = wait_for_all(arrived, barriers)
    for barrier in {*barriers}:
        ready[barriers.index(barrier)] = arrived[barriers.index(barrier)]
    iterated = [exchange.iterate(x) for exchange, x in zip(plan, ready, strict=True)]
    results: list[Any] = list(pieces)
    for exchange, x in zip(plan, wait_for_all(iterated, barriers), strict=True):
        for owned, blocks in zip(exchange.stacks, exchange.depart(x), strict=True):
            owned.stack.scatter(blocks, results)
    return unite([*map(_stored, results)])


def _stored(leaf: jax.Array) -> jax.Array:
    """Converts to float32 or wider; a large leaf is first stored in its own shape.

    XLA for TPU moves a reshape after what is elementwise, and would store an update in
    float32 once as it was sent and once as the leaf is: of Mixtral's update on 64 v5p
    that is 1.3 of 3.9 GB of temporaries. Smaller leaves take 3 % longer for it.
    """
    if leaf.size >= LARGE_LEAF:
        leaf = jax.lax.optimization_barrier(leaf)
    return leaf.astype(np.promote_types(leaf.dtype, jnp.float32))


def plan_exchanges(
    solver: Solver,
    leaves: Sequence[MatrixLeaf],
    mesh: Mapping[Any, int],
    slow: AxisNames = (),
) -> list[Exchange]:
    """Plans, alike on all devices, which matrices are sent together, and to whom."""
    stacks: dict[Any, list[OwnedStack]] = {}
    for owned in _owned_stacks(solver, leaves, mesh, slow):
        cut = owned.cut
        dtype = solver.wire_dtype(owned.stack.dtype)
        key: Any = cut.replicated, cut.sharded, cut.repeated, dtype
        if not cut.member_axes or owned.padding <= MOST_PADDING:
            key = owned.name
        stacks.setdefault(key, []).append(owned)
    # A parcel of one stack would be as large as the slots of its own exchange.
    parcels = [Parcels(solver, x, mesh) for x in stacks.values() if len(x) > 1]
    alone = [StackExchange(solver, x[0], mesh) for x in stacks.values() if len(x) == 1]
    return [*parcels, *alone]


def _owned_stacks(
    solver: Solver,
    leaves: Sequence[MatrixLeaf],
    mesh: Mapping[Any, int],
    slow: AxisNames,
) -> list[OwnedStack]:
    groups: dict[tuple[Cut, jnp.dtype, int | None], list[Part]] = {}
    for i, leaf in enumerate(leaves):
        view, spec = leaf.view, leaf.spec
        cut = cut_of(view, spec, mesh, slow)
        if not cut.sharded and solver.commutes_with_transposition:
            view = view.wide  # a device has all of a matrix, and to turn it is free
            cut = cut_of(view, spec, mesh, slow)
        local = local_view(view, spec, mesh)
        per_member, rest = divmod(
            local.count, math.prod(mesh[n] for n in cut.member_axes)
        )
        is_apart = not rest and per_member * math.prod(cut.shape) >= LARGE_LEAF
        key = cut, jnp.dtype(leaf.array.dtype), i if is_apart else None
        groups.setdefault(key, []).append((i, dataclasses.replace(leaf, view=local)))
    stacks = [
        (Stack(cut.shape, dtype, tuple(parts[i : i + MOST_LEAVES])), cut)
        for (cut, dtype, _), parts in groups.items()
        for i in range(0, len(parts), MOST_LEAVES)
    ]
    work = [
        Work(
            stack.count,
            solver.cost(stack.shape, stack.dtype),
            math.prod(stack.shape),
            groups_of(cut, mesh),
        )
        for stack, cut in stacks
    ]
    counts = assign_owners(work, math.prod(mesh.values()))
    entries = enumerate(zip(stacks, counts, strict=True))
    return [OwnedStack(f"stack{i}", *pair, each) for i, (pair, each) in entries]


def wait_for_all(
    arrays: Sequence[jax.Array], barriers: Sequence[Any]
) -> list[jax.Array]:
    """Makes the arrays of one barrier available only once all of them are.

    An array whose barrier is `None` does not wait.
    """
    results = [*arrays]
    for barrier in dict.fromkeys(x for x in barriers if x is not None):
        waiting = [i for i, x in enumerate(barriers) if x == barrier]
        if len(waiting) > 1:
            zero = zero_after([arrays[i] for i in waiting])
            for i in waiting:
                results[i] = _wait_for(zero, arrays[i])
    return results


def _wait_for(zero: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the array, which is whole only when the zero is known."""
    # One entry waits for it, in place: a sum with all of them would be a copy.
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)

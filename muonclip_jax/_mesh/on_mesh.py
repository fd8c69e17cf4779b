"""Orthogonalization by all devices of a mesh.

Blocks of leaves -> whole matrices, each at the device that owns it -> iterated there ->
blocks. Each stack needs two exchanges.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._axes import is_checked, keep_sharding, resharded, varying
from .._layout.layout import AxisNames, on_whole_blocks
from .._layout.shardings import along, blocks_along, but_along
from .._matrices.pieces import divide, pieces_of
from .._matrices.stacks import Matrices, MOST_LEAVES, Part, Stack, zero_after
from .._newton_schulz.solver import Solver
from .exchange import (
    Cut,
    cut_of,
    groups_of,
    local_view,
    share_out,
    Slots,
    to_blocks,
    to_owners,
)


#: A leaf with at least this many entries per device gets an exchange of its own. Small
#: leaves together need fewer exchanges; large ones alone need no copy into a stack:
#: 41 % of the temporaries of Mixtral's update on 64 v5p, by the compiler.
LARGE_SHARE = 2**24


class SharedStack(NamedTuple):
    """Matrices that the mesh cuts alike; the parts are a device's blocks."""

    stack: Stack
    cut: Cut
    share: Slots


def orthogonalize_on_mesh(
    solver: Solver, leaves: Sequence[Matrices], mesh: Mesh | AbstractMesh
) -> list[jax.Array]:
    """Orthogonalizes leaves that their specs shard on `mesh`, and leaves them so."""
    aligned = []
    for leaf in leaves:
        # Most leaves stay as they are. A fused kernel whose blocks show no piece is
        # gathered along its outputs, by XLA, and cut again.
        if (spec := _aligned(leaf, mesh.shape)) != leaf.spec:
            # The leaf itself stays where it is: without Nesterov's it is the momentum.
            x = _sharded(keep_sharding(leaf.array), mesh, spec)
            leaf = Matrices(x, leaf.view, spec)
        aligned.append(leaf)
    specs = [leaf.spec for leaf in aligned]

    def on_device(solver: Solver, leaves: list[Matrices]) -> list[jax.Array]:
        try:
            jax.lax.axis_size(tuple(mesh.axis_names))
        except NameError as error:
            raise ValueError(
                "jax.vmap maps over an axis that an explicit axis of the mesh shards, "
                "and devices along that axis cannot share Muon's work: map over an "
                "axis that is not sharded, or use jax.shard_map"
            ) from error
        return share_among_devices(solver, leaves, mesh.shape)

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


def _aligned(leaf: Matrices, mesh: Mapping[Any, int]) -> PartitionSpec:
    """The spec without what cuts through pieces, so that no block has all of one.

    Blocks of a fused query, key and value have entries of one or two of the three, so
    the outputs have to be gathered; blocks of whole groups or heads have pieces of
    their own.
    """
    if leaf.view.division is None:
        return leaf.spec
    pieces, through = pieces_of(leaf.view), set()
    for axis, (_, count) in enumerate(blocks_along(leaf.view.shape, leaf.spec, mesh)):
        sizes = [
            piece.view.shape[piece.of.index(axis)] if axis in piece.of else 1
            for piece in pieces
        ]
        if any(size % count for size in sizes):
            through.add(axis)
    return but_along(through, leaf.spec)


def _sharded(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """The array as `spec` shards it."""
    explicit = jax.typeof(x).sharding.mesh.explicit_axes
    if not explicit:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    # Alongside explicit axes, automatic ones follow from what the array is used for.
    return resharded(x, along(explicit, spec))


def orthogonalize_by_replicas(
    solver: Solver, leaves: Sequence[Matrices], axes: AxisNames
) -> list[jax.Array]:
    """Orthogonalizes leaves that are the same along all axes that do not cut them.

    By devices along the axes of `pmap`, `shard_map` and `vmap`: each iterates its share
    of the matrices, and one gather for each stack hands out all.
    """
    sizes = {name: jax.lax.axis_size(name) for name in axes}
    # What the loop over a share iterates differs from device to device, while the
    # leaves are the same on all: types have to know before they meet. Along an axis of
    # one device nothing differs, and no gather would take it back.
    several = tuple(name for name in axes if sizes[name] > 1)
    if several and is_checked(several):
        leaves = [leaf.of(varying(leaf.array, several)) for leaf in leaves]
    return on_whole_blocks(
        lambda whole: share_among_devices(solver, whole, sizes),
        leaves,
        kept=lambda leaf: along(several, _aligned(leaf, sizes)),
    )


def share_among_devices(
    solver: Solver, leaves: Sequence[Matrices], mesh: Mapping[Any, int]
) -> list[jax.Array]:
    """The work of one device: from its blocks of all leaves to the same, orthogonal.

    `mesh` maps names of axes to sizes.
    """
    # Every process makes the same plan by itself: it follows from shapes, specs and
    # costs alone, in an order that no hash decides.
    pieces, unite = divide(leaves)
    plan, arrived = plan_exchanges(solver, pieces, mesh), []
    for stack, cut, share in plan:
        # What is iterated in half precision is sent in it, which halves the traffic.
        blocks = jnp.concatenate(stack.gather(solver.wire_dtype(stack.dtype)))
        whole = to_owners(blocks, cut, share)
        member = jax.lax.axis_index(cut.members) if cut.members else 0
        arrived.append((whole, share.count_at(member)))
    iterated = iterate_share(solver, arrived)
    results: list[Any] = list(pieces)
    for (stack, cut, share), matrices in zip(plan, iterated, strict=True):
        blocks = to_blocks(matrices, cut, share)
        _, block = stack.parts[0]
        stack.scatter(blocks.reshape(-1, *block.view.matrix_shape), results)
    return unite([*map(_stored, results)])


def _stored(leaf: jax.Array) -> jax.Array:
    """Converts to float32 or wider; a large leaf is first stored in its own shape.

    XLA for TPU moves a reshape after what is elementwise, and would store an update in
    float32 once as it was sent and once as the leaf is: of Mixtral's update on 64 v5p
    that is 1.3 of 3.9 GB of temporaries. Smaller leaves take 3 % longer for it.
    """
    if leaf.size >= LARGE_SHARE:
        leaf = jax.lax.optimization_barrier(leaf)
    return leaf.astype(np.promote_types(leaf.dtype, jnp.float32))


def plan_exchanges(
    solver: Solver, leaves: Sequence[Matrices], mesh: Mapping[str, int]
) -> list[SharedStack]:
    """Matrices that share a stack, and who iterates them; the same on all devices."""
    groups: dict[tuple[Cut, jnp.dtype, int | None], list[Part]] = {}
    for i, leaf in enumerate(leaves):
        view, spec = leaf.view, leaf.spec
        cut = cut_of(view, spec, mesh)
        if not cut.sharded and solver.commutes_with_transposition:
            view = view.wide  # a device has all of a matrix, and to turn it is free
            cut = cut_of(view, spec, mesh)
        own = local_view(view, spec, mesh)
        share, rest = divmod(own.count, math.prod(mesh[n] for n in cut.members))
        is_apart = not rest and share * math.prod(cut.shape) >= LARGE_SHARE
        key = cut, jnp.dtype(leaf.array.dtype), i if is_apart else None
        groups.setdefault(key, []).append((i, dataclasses.replace(leaf, view=own)))
    stacks = [
        (Stack(cut.shape, dtype, tuple(parts[i : i + MOST_LEAVES])), cut)
        for (cut, dtype, _), parts in groups.items()
        for i in range(0, len(parts), MOST_LEAVES)
    ]
    work = [
        (stack.count, solver.cost(stack.shape, stack.dtype), groups_of(cut, mesh))
        for stack, cut in stacks
    ]
    shares = share_out(work, math.prod(mesh.values()))
    return [SharedStack(*x, share) for x, share in zip(stacks, shares, strict=True)]


#: The matrices of a stack that one device iterates: the first so many, or all.
Counted = tuple[jax.Array, jax.Array | None]


def iterate_share(solver: Solver, stacks: Sequence[Counted]) -> list[jax.Array]:
    """The matrices of each stack that one device iterates: the first `count`, or all.

    Where devices have different numbers of matrices, iteration starts once all stacks
    have arrived, and returns start once all are done. Work is balanced over all stacks
    together: exchanges in between would make every device wait for the slowest of each
    stack.
    """
    iterated = []
    for i, (stack, count) in enumerate(_together(stacks)):
        # A name by which benchmarks know its loop.
        with jax.named_scope(f"stack{i}"):
            iterated.append((solver.orthogonalize_all(stack, count), count))
    return [x for x, _ in _together(iterated)]


def _together(stacks: Sequence[Counted]) -> list[Counted]:
    """Makes stacks with a count available only once all of them are."""
    # Only stacks with a count wait: of the others every device has as many, and none is
    # late.
    zero = zero_after([x for x, count in stacks if count is not None])
    return [(x if n is None else _wait_for(zero, x), n) for x, n in stacks]


def _wait_for(zero: jax.Array, x: jax.Array) -> jax.Array:
    """The same array, but whole only when the zero is known."""
    # One entry waits for it, in place: a sum with all of them would be a copy.
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)

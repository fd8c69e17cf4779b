"""Orthogonalization by all devices of a mesh.

Blocks of leaves -> whole matrices, each at the device that owns it -> iterated there ->
blocks. Each stack needs two exchanges.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._axes import is_checked, keep_sharding, resharded, varying
from .._layout.layout import AxisNames, cut_axes, Cuts, on_whole_blocks
from .._layout.shardings import along, blocks_along
from .._matrices.pieces import divide, pieces_of
from .._matrices.stacks import MatrixView, MOST_LEAVES, Part, Stack, zero_after
from .._newton_schulz.solver import Solver
from .exchange import (
    Cut,
    cut_of,
    groups_of,
    local_view,
    Share,
    share_out,
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
    share: Share


def orthogonalize_on_mesh(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """Orthogonalizes leaves that `specs` shard on `mesh`, and leaves them so."""
    given = specs
    specs = [_aligned(*pair, mesh.shape) for pair in zip(views, specs, strict=True)]
    # Of most leaves these are the same. A fused kernel whose blocks show no piece is
    # gathered along its outputs, by XLA, and cut again.
    leaves = [
        # The leaf itself stays where it is: without Nesterov's it is the momentum.
        x if own == spec else _sharded(keep_sharding(x), mesh, spec)
        for x, own, spec in zip(leaves, given, specs, strict=True)
    ]

    def on_device(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
        try:
            jax.lax.axis_size(tuple(mesh.axis_names))
        except NameError as error:
            raise ValueError(
                "jax.vmap maps over an axis that an explicit axis of the mesh shards, "
                "and devices along that axis cannot share Muon's work: map over an "
                "axis that is not sharded, or use jax.shard_map"
            ) from error
        return share_among_devices(
            solver, leaves, views=views, mesh=mesh.shape, specs=specs
        )

    results = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), list(specs)),
        out_specs=list(specs),
        check_vma=False,  # as in `orthogonalize_by_constraint`
    )(solver, list(leaves))
    return [
        x if own == spec else _sharded(x, mesh, own)
        for x, own, spec in zip(results, given, specs, strict=True)
    ]


def _aligned(
    view: MatrixView, spec: PartitionSpec, mesh: Mapping[Any, int]
) -> PartitionSpec:
    """The spec without what cuts through pieces, so that no block has all of one.

    Blocks of a fused query, key and value have entries of one or two of the three, so
    the outputs have to be gathered; blocks of whole groups or heads have pieces of
    their own.
    """
    if view.division is None:
        return spec
    pieces, entries = pieces_of(view), []
    counts = blocks_along(spec, len(spec), mesh)
    for axis, (entry, count) in enumerate(zip(spec, counts, strict=True)):
        sizes = [
            piece.view.shape[piece.of.index(axis)] if axis in piece.of else 1
            for piece in pieces
        ]
        entries.append(None if any(size % count for size in sizes) else entry)
    return PartitionSpec(*entries)


def _sharded(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """The array as `spec` shards it."""
    explicit = jax.typeof(x).sharding.mesh.explicit_axes
    if not explicit:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    # Alongside explicit axes, automatic ones follow from what the array is used for.
    return resharded(x, along(explicit, spec))


def orthogonalize_by_replicas(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    cuts: Cuts,
    axes: AxisNames,
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
        leaves = [varying(x, several) for x in leaves]
    aligned = (_aligned(*pair, sizes) for pair in zip(views, cuts, strict=True))
    specs = [along(several, spec) for spec in aligned]
    apart = [
        along({*cut_axes(cut)} - {*cut_axes(spec)}, cut)
        for cut, spec in zip(cuts, specs, strict=True)
    ]
    share = functools.partial(
        share_among_devices, solver, views=views, mesh=sizes, specs=specs
    )
    return on_whole_blocks(share, apart, leaves)


def share_among_devices(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mapping[Any, int],
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """The work of one device: from its blocks of all leaves to the same, orthogonal.

    `mesh` maps names of axes to sizes.
    """
    # Every process makes the same plan by itself: it follows from shapes, specs and
    # costs alone, in an order that no hash decides.
    pieces = divide(leaves, views, specs)
    leaves, views, specs = pieces[:3]
    plan = plan_exchanges(solver, [x.dtype for x in leaves], views, specs, mesh)
    arrived, counts = [], []
    for stack, cut, share in plan:
        # What is iterated in half precision is sent in it, which halves the traffic.
        blocks = stack.gather(leaves, solver.wire_dtype(jnp.dtype(stack.dtype)))
        arrived.append(to_owners(blocks, cut, share))
        member = jax.lax.axis_index(cut.members) if cut.members else 0
        counts.append(share.count_at(member))
    iterated = iterate_share(solver, arrived, counts)
    results: list[Any] = list(leaves)
    for (stack, cut, share), matrices in zip(plan, iterated, strict=True):
        blocks = to_blocks(matrices, cut, share)
        local = stack.parts[0].view.matrix_shape
        stack.scatter(blocks.reshape(-1, *local), results)
    return pieces.unite([*map(_stored, results)])


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
    solver: Solver,
    dtypes: Sequence[jnp.dtype],
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
) -> list[SharedStack]:
    """Matrices that share a stack, and who iterates them; the same on all devices."""
    groups: dict[tuple[Cut, str, int | None], list[Part]] = {}
    for i, (view, spec) in enumerate(zip(views, specs, strict=True)):
        cut = cut_of(view, spec, mesh)
        if not cut.sharded and solver.commutes_with_transposition:
            view = view.wide  # a device has all of a matrix, and to turn it is free
            cut = cut_of(view, spec, mesh)
        part = Part(i, local_view(view, spec, mesh))
        share, rest = divmod(part.view.count, math.prod(mesh[n] for n in cut.members))
        is_apart = not rest and share * math.prod(cut.shape) >= LARGE_SHARE
        key = cut, jnp.dtype(dtypes[i]).name, i if is_apart else None
        groups.setdefault(key, []).append(part)
    stacks, cuts = [], []
    for (cut, dtype, _), parts in groups.items():
        for i in range(0, len(parts), MOST_LEAVES):
            stacks.append(Stack(cut.shape, dtype, tuple(parts[i : i + MOST_LEAVES])))
            cuts.append(cut)
    shares = share_out(
        [stack.count for stack in stacks],
        [solver.cost(stack.shape, jnp.dtype(stack.dtype)) for stack in stacks],
        [groups_of(cut, mesh) for cut in cuts],
        math.prod(mesh.values()),
    )
    return [SharedStack(*each) for each in zip(stacks, cuts, shares, strict=True)]


def iterate_share(
    solver: Solver,
    stacks: Sequence[jax.Array],
    counts: Sequence[jax.Array | None],
) -> list[jax.Array]:
    """The matrices of each stack that one device iterates: the first `count`, or all.

    Where devices have different numbers of matrices, iteration starts once all stacks
    have arrived, and returns start once all are done. Work is balanced over all stacks
    together: exchanges in between would make every device wait for the slowest of each
    stack.
    """
    iterated = []
    pairs = zip(_together(stacks, counts), counts, strict=True)
    for i, (stack, count) in enumerate(pairs):
        # A name by which benchmarks know its loop.
        with jax.named_scope(f"stack{i}"):
            iterated.append(solver.orthogonalize_all(stack, count))
    return _together(iterated, counts)


def _together(
    arrays: Sequence[jax.Array], counts: Sequence[jax.Array | None]
) -> list[jax.Array]:
    """Makes arrays with a count available only once all of them are."""
    uneven = [x for x, count in zip(arrays, counts, strict=True) if count is not None]
    # Only arrays with a count wait: of the others every device has as many, and none is
    # late.
    zero = zero_after(uneven)
    return [
        x if count is None else _wait_for(zero, x)
        for x, count in zip(arrays, counts, strict=True)
    ]


def _wait_for(zero: jax.Array, x: jax.Array) -> jax.Array:
    """The same array, but whole only when the zero is known."""
    # One entry waits for it, in place: a sum with all of them would be a copy.
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)

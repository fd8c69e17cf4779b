"""Orthogonalization by all devices of a mesh.

Blocks of leaves -> whole matrices, each at the device that owns it -> iterated there ->
blocks. Each stack needs two exchanges.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._axes import is_checked, resharded, varying
from .._layout.layout import Axes, Cuts, gather, own_block
from .._layout.shardings import mesh_axes
from .._matrices.pieces import divide, pieces_of
from .._matrices.stacks import MatrixView, Part, Stack
from .._newton_schulz.solver import Solver
from .block_layout import block_layout, local_view
from .exchange import Exchange, EXCHANGES
from .ownership import assign_owners, Work


#: How many more slots matrices may take in stacks of one layout than in one of all.
MOST_PADDING = 1.1

#: From how many entries on each device on a leaf is stored as soon as it is back, and
#: exchanged by itself, if that pads nothing. A stack of several leaves has to be whole
#: before any of it is sent; with one stack for each leaf of experts, of 0.47 GB on each
#: device, Mixtral's update takes 0.5 GB less on 64 v5p by the compiler's estimate, for
#: as many bytes sent.
LARGE_SHARE = 2**24


class SharedStack(NamedTuple):
    """Matrices of one shape, dtype and axis roles; the parts are a device's blocks."""

    stack: Stack
    exchange: Exchange


def orthogonalize_on_mesh(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """Orthogonalizes leaves that `specs` shard on `mesh`, and leaves them so."""
    given, specs = specs, _aligned(views, specs, mesh.shape)
    # Of most leaves these are the same. A fused kernel whose blocks show no piece is
    # gathered along its outputs, by XLA, and cut again.
    leaves = [
        x if own == spec else _sharded(x, mesh, spec)
        for x, own, spec in zip(leaves, given, specs, strict=True)
    ]

    def on_device(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
        try:
            jax.lax.axis_size(tuple(mesh.axis_names))
        except NameError as error:
            raise ValueError(
                "jax.vmap maps an axis that an explicit axis of the mesh shards, which "
                "takes that axis away from the devices that share Muon's work: map "
                "over an axis that is not sharded, or use jax.shard_map"
            ) from error
        return share_among_devices(
            solver, leaves, views=views, mesh=mesh.shape, specs=specs
        )

    results = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), list(specs)),
        out_specs=list(specs),
        check_vma=False,
    )(solver, list(leaves))
    return [
        x if own == spec else _sharded(x, mesh, own)
        for x, own, spec in zip(results, given, specs, strict=True)
    ]


def _aligned(
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[Any, int],
) -> list[PartitionSpec]:
    """The specs without what cuts through pieces, so that no block has all of one.

    Blocks of a fused query, key and value have entries of one or two of the three, so
    the outputs have to be gathered; blocks of whole groups or heads have pieces of
    their own.
    """

    def aligned(view: MatrixView, spec: PartitionSpec) -> PartitionSpec:
        pieces, entries = pieces_of(view), []
        for axis, entry in enumerate(spec):
            count = math.prod(mesh[name] for name in mesh_axes(entry))
            sizes = [
                piece.view.shape[piece.of.index(axis)] if axis in piece.of else 1
                for piece in pieces
            ]
            entries.append(None if any(size % count for size in sizes) else entry)
        return PartitionSpec(*entries)

    return [
        aligned(view, spec) if view.division else spec
        for view, spec in zip(views, specs, strict=True)
    ]


def _sharded(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """The array as `spec` shards it."""
    explicit = jax.typeof(x).sharding.mesh.explicit_axes
    if not explicit:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    # Next to explicit axes, automatic ones follow from what the array is used for.
    entries = (tuple(n for n in mesh_axes(e) if n in explicit) for e in spec)
    return resharded(x, PartitionSpec(*(names or None for names in entries)))


def orthogonalize_by_replicas(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    cuts: Cuts,
    axes: Axes,
) -> list[jax.Array]:
    """Orthogonalizes leaves that are the same along all axes that do not cut them.

    By devices that `pmap`, `shard_map` and `vmap` tell apart: each iterates its share
    of the matrices, and one gather for each stack hands out all.
    """
    # What the loop over a share iterates differs from device to device, while the
    # leaves are the same on all: types have to know before they meet.
    if is_checked(axes):
        leaves = [varying(x, axes) for x in leaves]
    sizes = {name: jax.lax.axis_size(name) for name in axes}
    specs = _aligned(views, cuts, sizes)
    apart = [
        PartitionSpec(
            *(x if kept is None else None for x, kept in zip(*pair, strict=True))
        )
        for pair in zip(cuts, specs, strict=True)
    ]
    whole = [gather(*pair) for pair in zip(leaves, apart, strict=True)]
    results = share_among_devices(solver, whole, views=views, mesh=sizes, specs=specs)
    return [own_block(*pair) for pair in zip(results, apart, strict=True)]


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
    matrices = iterate_share(
        solver,
        [stack for stack, _ in plan],
        [_to_owners(solver, *shared, leaves) for shared in plan],
        [exchange.count() for _, exchange in plan],
    )
    results: list[Any] = list(leaves)
    on_cpu = solver.its_platform.name == "cpu"
    for (stack, exchange), mine in zip(plan, matrices, strict=True):
        stack.scatter(
            exchange.to_blocks(mine),
            results,
            on_cpu=on_cpu,
            store_from=math.inf if on_cpu else LARGE_SHARE,
        )
    return pieces.unite(results)


def iterate_share(
    solver: Solver,
    stacks: Sequence[Stack],
    matrices: Sequence[jax.Array],
    counts: Sequence[jax.Array | None],
) -> list[jax.Array]:
    """What one device iterates of each stack: the first `count` matrices, or all.

    Where devices have different numbers of matrices, none is iterated before all have
    arrived, and none returned before all are done: who waited in between for a device
    with more to do in the same stack would wait once for each stack, where the work is
    even over all of them alone.
    """
    iterated = []
    arrived = _together(matrices, counts)
    for i, (stack, mine, count) in enumerate(zip(stacks, arrived, counts, strict=True)):

        def orthogonalize(*batches: jax.Array, dtype: str = stack.dtype):
            # The dtype of the iteration follows from that of the leaf, not of the wire.
            return solver.orthogonalize(*[x.astype(dtype) for x in batches])

        # A name by which benchmarks know its loop.
        with jax.named_scope(f"stack{i}"):
            iterated.append(solver.map(orthogonalize, mine, count, mine.dtype))
    return _together(iterated, counts)


def _together(
    arrays: Sequence[jax.Array], counts: Sequence[jax.Array | None]
) -> list[jax.Array]:
    """The arrays, of which those with a count are there once all with a count are."""
    uneven = [x for x, count in zip(arrays, counts, strict=True) if count is not None]
    # Only arrays with a count wait: of the others every device has as many, and none is
    # late.
    zero = _zero_after(uneven)
    return [
        x if count is None else _wait_for(zero, x)
        for x, count in zip(arrays, counts, strict=True)
    ]


def _zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """0, but known only when all arrays are there: an ordering token."""
    # Data, since XLA drops optimization barriers before it puts operations in order.
    # Of any number `isnan` is 0 or 1, and the minimum with 0 is 0, which XLA does not
    # see through.
    numbers = [jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)


def _wait_for(zero: jax.Array, x: jax.Array) -> jax.Array:
    """The same array, but whole only when the zero is known."""
    # One entry waits for it, in place: a sum with all of them would be a copy.
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)


def plan_exchanges(
    solver: Solver,
    dtypes: Sequence[jnp.dtype],
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
) -> list[SharedStack]:
    """Matrices that share a stack, and who iterates them; the same on all devices."""
    layouts = [block_layout(*each, mesh) for each in zip(views, specs, strict=True)]
    parts = [
        Part(i, local_view(*each, mesh))
        for i, each in enumerate(zip(views, specs, strict=True))
    ]

    def stack_of(leaves: Sequence[int]) -> Stack:
        dtype = jnp.dtype(dtypes[leaves[0]]).name
        members = tuple(parts[i] for i in leaves)
        return Stack(layouts[leaves[0]].shape, dtype, members)

    def owners_of(leaf: int) -> int:
        """The number of devices that share the matrices of a leaf."""
        roles = layouts[leaf].roles
        return math.prod(mesh[name] for name in roles.replicated + roles.sharded)

    # All of them have as many slots as the one with the most matrices: what is
    # exchanged is padded to that.
    def slots_of(groups: Sequence[Sequence[int]]) -> int:
        devices = owners_of(groups[0][0])
        return sum(math.ceil(stack_of(group).count / devices) for group in groups)

    def is_apart(leaf: int) -> bool:
        share, rest = divmod(parts[leaf].view.count, owners_of(leaf))
        return not rest and share * math.prod(layouts[leaf].shape) >= LARGE_SHARE

    groups: list[list[int]] = []
    everyone = range(len(layouts))
    for group in _grouped(
        everyone,
        lambda i: (jnp.dtype(dtypes[i]), layouts[i].wide.shape, layouts[i].roles),
    ):
        # Leaves that the mesh cuts in one way are put together in one way, and iterated
        # as they are, tall or wide. Others share a stack with them, turned, only where
        # each stack by itself would be padded too much.
        divided = _grouped(group, lambda i: layouts[i])
        # Where the mesh cuts no matrix a device has all of it, and to turn it there is
        # free.
        is_cut = bool(layouts[group[0]].roles.sharded)
        if is_cut and slots_of(divided) <= MOST_PADDING * slots_of([group]):
            groups += divided
        else:
            groups.append(group)
            for i in group:
                layouts[i] = layouts[i].wide
    apart = [[i] for group in groups for i in group if is_apart(i)]
    shared = [[i for i in group if not is_apart(i)] for group in groups]
    groups = apart + [group for group in shared if group]
    stacks = [stack_of(group) for group in groups]
    works = [
        Work(
            stack.count,
            solver.cost(stack.shape, jnp.dtype(stack.dtype)),
            layouts[group[0]].roles,
        )
        for stack, group in zip(stacks, groups, strict=True)
    ]
    plan = []
    for stack, group, work, owners in zip(
        stacks, groups, works, assign_owners(works, mesh), strict=True
    ):
        different = list(dict.fromkeys(layouts[i] for i in group))
        kinds = [
            np.full(parts[i].view.count, different.index(layouts[i])) for i in group
        ]
        kind = next(each for each in EXCHANGES if each.serves(owners, work.roles))
        exchange = kind(owners, work.roles, tuple(different), np.concatenate(kinds))
        plan.append(SharedStack(stack, exchange))
    return plan


def _grouped(leaves: Iterable[int], kind: Callable[[int], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for i in leaves:
        groups.setdefault(kind(i), []).append(i)
    return list(groups.values())


def _to_owners(
    solver: Solver, stack: Stack, exchange: Exchange, leaves: Sequence[jax.Array]
) -> jax.Array:
    """This device's blocks of the matrices of a stack, sent to those who own them."""
    # What is iterated in half precision is sent in it, which halves the traffic. The
    # iteration rounds the same numbers anyway, but for their norm.
    wire = solver.wire_dtype(jnp.dtype(stack.dtype))

    def to_blocks(view: MatrixView, leaf: jax.Array) -> jax.Array:
        matrices = view.to_matrices(leaf).astype(wire)
        return matrices.reshape(-1, *exchange.block_shape)

    return exchange.to_owners(stack.gather(leaves, to_blocks))

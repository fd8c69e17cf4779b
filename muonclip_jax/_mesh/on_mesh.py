"""Orthogonalization by all devices of a mesh.

Blocks of leaves -> whole matrices, each at the device that owns it -> iterated there ->
blocks. Each stack needs two exchanges, and between them no device waits for another.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._jax_versions import is_checked, varying
from .._layout.layout import Axes, Cuts
from .._matrices.stacks import Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .._newton_schulz.waiting import wait_for, zero_after
from .exchange import Exchange, Slots
from .rounds import fetch_first, iterate_in_rounds
from .shared_stacks import plan_exchanges, SharedStack


class Parcel(NamedTuple):
    """Slots of a stack that travel and are iterated on their own."""

    number: int  # of the stack
    shared: SharedStack
    slots: Slots

    @property
    def stack(self) -> Stack:
        return self.shared.stack

    @property
    def exchange(self) -> Exchange:
        return self.shared.exchange

    def bring_back(self, matrices: jax.Array, returned: list[Any]) -> None:
        """Adds them to what came back of all stacks."""
        before = returned[self.number]
        returned[self.number] = self.exchange.to_sources(matrices, self.slots, before)


#: Chips for which the compiler has exchanges of unequal sizes. For "TPU v5 lite" it has
#: some, and refuses others.
RAGGED_KINDS = ("TPU v4", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")


def is_ragged(mesh: Mesh | AbstractMesh) -> bool:
    """Whether devices of a mesh can send each other messages of unequal sizes."""
    device = mesh.abstract_mesh.abstract_device
    return device is not None and device.device_kind in RAGGED_KINDS


def orthogonalize_on_mesh(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """Orthogonalizes leaves that `specs` shard on `mesh`, and leaves them so."""

    def on_device(solver: Solver, leaves: list[jax.Array]) -> list[jax.Array]:
        try:
            jax.lax.axis_size(tuple(mesh.axis_names))
        except NameError as error:
            raise ValueError(
                "jax.vmap maps an axis that an explicit axis of the mesh shards, which "
                "takes that axis away from the devices that share Muon's work: map "
                "over an axis that is not sharded, or use jax.shard_map"
            ) from error
        return orthogonalize_on_each_device(
            solver,
            leaves,
            views=views,
            mesh=mesh.shape,
            specs=specs,
            ragged=is_ragged(mesh),
        )

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), list(specs)),
        out_specs=list(specs),
        check_vma=False,
    )(solver, list(leaves))


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
    if is_checked(axes):
        leaves = [varying(x, axes) for x in leaves]
    sizes = {name: jax.lax.axis_size(name) for name in axes}
    return orthogonalize_on_each_device(
        solver, leaves, views=views, mesh=sizes, specs=cuts
    )


def orthogonalize_on_each_device(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mapping[Any, int],
    specs: Sequence[PartitionSpec],
    ragged: bool = False,
) -> list[jax.Array]:
    """What one device does: from its blocks of all leaves to the same, orthogonal.

    `mesh` maps names of axes to sizes; `ragged` is whether its devices can send each
    other messages of unequal sizes.
    """
    dtypes = [x.dtype for x in leaves]
    shared = plan_exchanges(solver, dtypes, views, specs, mesh, ragged=ragged)
    parcels = [
        Parcel(number, each, slots)
        for number, each in enumerate(shared)
        for slots in each.rest(solver)
    ]
    blocks = _blocks(solver, shared, leaves)
    returned = [
        each.exchange.nothing_yet(of_stack)
        for each, of_stack in zip(shared, blocks, strict=True)
    ]
    received = [x.exchange.to_owners(blocks[x.number], x.slots) for x in parcels]
    if solver.platform == "gpu" and all(x.exchange.is_even for x in parcels):
        _one_after_the_other(solver, parcels, received, returned)
    else:
        _all_at_once(solver, shared, parcels, blocks, received, returned)
    results: list[Any] = list(leaves)
    on_cpu = solver.platform == "cpu"
    for (stack, exchange), back in zip(shared, returned, strict=True):
        stack.scatter(exchange.to_blocks(back), results, on_cpu=on_cpu)
    return results


def _all_at_once(
    solver: Solver,
    shared: Sequence[SharedStack],
    parcels: Sequence[Parcel],
    blocks: Sequence[jax.Array],
    received: Sequence[jax.Array],
    returned: list[Any],
) -> None:
    """Iterates all parcels after the first exchange of all and before the second.

    Between the two no device waits for another: one that has nothing in one stack
    starts on what it has in the next. A barrier would not do, since compilers drop it
    before they put operations in order. What returns after the rounds travels while
    their results are used.
    """
    first = [fetch_first(solver, *each) for each in zip(shared, blocks, strict=True)]
    zero = zero_after([*received, *itertools.chain(*first)])
    iterated = []
    for parcel, matrices in zip(parcels, received, strict=True):
        # A name by which benchmarks know its loop.
        with jax.named_scope(f"stack{parcel.number}"):
            mine, zero = _iterate_own(solver, parcel, matrices, zero)
        iterated.append(mine)
    for number, each in enumerate(shared):
        returned[number], zero = iterate_in_rounds(
            solver, each, first[number], returned[number], zero
        )
    for parcel, mine in zip(parcels, iterated, strict=True):
        parcel.bring_back(wait_for(zero, mine), returned)


def _one_after_the_other(
    solver: Solver,
    parcels: Sequence[Parcel],
    received: Sequence[jax.Array],
    returned: list[Any],
) -> None:
    """A parcel begins when the one before is iterated, and ends when that is back.

    So exchanges of its neighbours run beside it. It is for devices that have the same
    number of matrices in each.
    """
    zero, last = jnp.int32(0), []
    for parcel, matrices in zip(parcels, received, strict=True):
        matrices = matrices + zero.astype(matrices.dtype)
        mine, _ = _iterate_own(solver, parcel, matrices, zero)
        mine = mine + zero_after(last).astype(mine.dtype)
        zero = zero_after([mine])
        parcel.bring_back(mine, returned)
        last = returned[parcel.number][-1:]


def _blocks(
    solver: Solver, shared: Sequence[SharedStack], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """This device's blocks of the matrices of each stack, as they travel."""

    def of_stack(stack: Stack, exchange: Exchange) -> jax.Array:
        wire = solver.wire_dtype(jnp.dtype(stack.dtype))

        def to_blocks(view: MatrixView, leaf: jax.Array) -> jax.Array:
            matrices = view.to_matrices(leaf).astype(wire)
            return matrices.reshape(-1, *exchange.block_shape)

        return stack.gather(leaves, to_blocks, exchange.padding)

    return [of_stack(*each) for each in shared]


def _iterate_own(
    solver: Solver, parcel: Parcel, matrices: jax.Array, zero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def orthogonalize(*batches: jax.Array) -> list[jax.Array]:
        # The dtype of the iteration follows from that of the leaf, not of the wire.
        leaves = [x.astype(parcel.stack.dtype) for x in batches]
        return [y.astype(matrices.dtype) for y in solver.orthogonalize(*leaves)]

    if not parcel.exchange.is_even:
        count = parcel.exchange.count() - parcel.slots.start
        return solver.map_first(orthogonalize, matrices, count, zero)
    return solver.map(orthogonalize, matrices), zero

"""Orthogonalization by all devices of a mesh.

Blocks of leaves -> whole matrices, each at the device that owns it -> iterated there ->
blocks. Each stack needs two exchanges, and between them no device waits for another.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._matrices.stacks import Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .exchange import Exchange, Slots
from .repeats import NO_REPEATS, Repeats
from .shared_stacks import plan_exchanges, SharedStack


class Parcel(NamedTuple):
    """A piece of a stack, which travels and is iterated on its own."""

    number: int  # of the stack
    shared: SharedStack
    piece: Slots

    @property
    def stack(self) -> Stack:
        return self.shared.stack

    @property
    def exchange(self) -> Exchange:
        return self.shared.exchange


def orthogonalize_on_mesh(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec],
    repeats: Repeats = NO_REPEATS,
) -> list[jax.Array]:
    """Orthogonalizes leaves that lie on `mesh` as `specs` say, and leaves them so."""
    on_device = functools.partial(
        orthogonalize_on_each_device,
        views=views,
        mesh=mesh.shape,
        specs=specs,
        repeats=repeats,
    )
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), list(specs)),
        out_specs=list(specs),
        check_vma=False,
    )(solver, list(leaves))


def orthogonalize_on_each_device(
    solver: Solver,
    leaves: Sequence[jax.Array],
    *,
    views: Sequence[MatrixView],
    mesh: Mapping[str, int],
    specs: Sequence[PartitionSpec],
    repeats: Repeats = NO_REPEATS,
) -> list[jax.Array]:
    """What one device does: from its blocks of all leaves to the same, orthogonal.

    `mesh` maps names of axes to sizes.
    """
    dtypes = [x.dtype for x in leaves]
    shared = plan_exchanges(solver, dtypes, views, specs, mesh, repeats)
    parcels = [
        Parcel(number, each, piece)
        for number, each in enumerate(shared)
        for piece in each.exchange.pieces(
            functools.partial(solver.pieces, each.stack.shape)
        )
    ]
    returned = _orthogonalize_parcels(solver, parcels, _blocks(solver, shared, leaves))
    results: list[Any] = list(leaves)
    on_cpu = solver.platform == "cpu"
    for number, (stack, exchange) in enumerate(shared):
        blocks = exchange.to_blocks(returned[number])
        stack.scatter(blocks, results, on_cpu=on_cpu)
    return results


def _orthogonalize_parcels(
    solver: Solver, parcels: Sequence[Parcel], blocks: Sequence[jax.Array]
) -> dict[int, list[jax.Array]]:
    """Blocks of each stack to the same, orthogonal, parcel by parcel.

    Between the two exchanges of all stacks no device waits for another: one that has
    nothing in one stack starts on what it has in the next. A barrier would not do,
    since compilers drop it before they put operations in order.
    """
    collected = [x.exchange.collect(blocks[x.number], x.piece) for x in parcels]
    received = [
        x.exchange.to_owners(sent, x.piece)
        for x, sent in zip(parcels, collected, strict=True)
    ]
    if solver.platform == "gpu" and all(x.exchange.is_even for x in parcels):
        return _one_after_the_other(solver, parcels, received)
    zero = zero_after(received)
    iterated = []
    for parcel, matrices in zip(parcels, received, strict=True):
        # A name by which benchmarks know its loop.
        with jax.named_scope(f"stack{parcel.number}"):
            mine, zero = _iterate_own(solver, parcel, matrices, zero)
        iterated.append(mine)
    returned: dict[int, list[jax.Array]] = {}
    for parcel, mine in zip(parcels, iterated, strict=True):
        back = parcel.exchange.to_sources(_after(zero, mine), parcel.piece)
        returned.setdefault(parcel.number, []).append(back)
    return returned


def _one_after_the_other(
    solver: Solver, parcels: Sequence[Parcel], received: Sequence[jax.Array]
) -> dict[int, list[jax.Array]]:
    """A parcel begins when the last is iterated, and ends when that is back.

    So the last one travels while it is iterated, and so does the next one. It is for
    devices that have the same number of matrices in each.
    """
    zero, last, returned = jnp.int32(0), [], {}
    for parcel, matrices in zip(parcels, received, strict=True):
        matrices = matrices + zero.astype(matrices.dtype)
        mine, _ = _iterate_own(solver, parcel, matrices, zero)
        mine = mine + zero_after(last).astype(mine.dtype)
        zero = zero_after([mine])
        last = [parcel.exchange.to_sources(mine, parcel.piece)]
        returned.setdefault(parcel.number, []).extend(last)
    return returned


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


def zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """0, but known only when all arrays are there."""
    numbers = [jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)


def _after(zero: jax.Array, x: jax.Array) -> jax.Array:
    """An array, but whole only when the zero is known: one entry waits for it."""
    corner = (0,) * x.ndim
    entry = jax.lax.slice(x, corner, (1,) * x.ndim) + zero.astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, entry, corner)


def _iterate_own(
    solver: Solver, parcel: Parcel, matrices: jax.Array, zero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def orthogonalize(*batches: jax.Array) -> list[jax.Array]:
        # The dtype of the iteration follows from that of the leaf, not of the wire.
        leaves = [x.astype(parcel.stack.dtype) for x in batches]
        return [y.astype(matrices.dtype) for y in solver.orthogonalize(*leaves)]

    if not parcel.exchange.is_even:
        count = parcel.exchange.count()
        return solver.map_first(orthogonalize, matrices, count, zero)
    return solver.map(orthogonalize, matrices), zero

"""Orthogonalization by all devices of a mesh.

Blocks of leaves -> whole matrices, each at the device that owns it -> iterated there ->
blocks. Each stack needs two exchanges, and between them no device waits for another.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._matrices.stacks import Part, Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .block_layout import block_layout, BlockLayout, local_view
from .exchange import Exchange
from .ownership import assign_owners, Work


class SharedStack(NamedTuple):
    """Matrices of one shape, dtype and role of each axis; the parts are a device's."""

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
    """Orthogonalizes leaves that lie on `mesh` as `specs` say, and leaves them so."""
    on_device = functools.partial(
        orthogonalize_on_each_device, views=views, mesh=mesh.shape, specs=specs
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
) -> list[jax.Array]:
    """What one device does: from its blocks of all leaves to the same, orthogonal.

    `mesh` maps names of axes to sizes.
    """
    shared = plan_exchanges(solver, [x.dtype for x in leaves], views, specs, mesh)
    # Between the two exchanges of all stacks no device waits for another: one that has
    # nothing in one stack starts on what it has in the next. A barrier would not do,
    # since compilers drop it before they put operations in order.
    received = [_send_to_owners(solver, *each, leaves) for each in shared]
    zero, iterated = _zero_after(received), []
    for i, (each, matrices) in enumerate(zip(shared, received, strict=True)):
        # A name by which benchmarks know its loop.
        with jax.named_scope(f"stack{i}"):
            mine, zero = _iterate_own(solver, *each, matrices, zero)
        iterated.append(mine)
    results: list[Any] = list(leaves)
    on_cpu = solver.platform == "cpu"
    for (stack, exchange), mine in zip(shared, iterated, strict=True):
        blocks = exchange.to_blocks(mine + zero.astype(mine.dtype))
        stack.scatter(blocks, MatrixView.from_matrices, results, on_cpu=on_cpu)
    return results


def plan_exchanges(
    solver: Solver,
    dtypes: Sequence[jnp.dtype],
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
) -> list[SharedStack]:
    groups: dict[tuple, list[tuple[Part, BlockLayout]]] = {}
    for i, (dtype, view, spec) in enumerate(zip(dtypes, views, specs, strict=True)):
        layout = block_layout(view, spec, mesh)
        key = layout.shape, jnp.dtype(dtype).name, layout.roles
        part = Part(i, local_view(view, spec, mesh))
        groups.setdefault(key, []).append((part, layout))
    stacks = [
        Stack(shape, dtype, tuple(part for part, _ in group))
        for (shape, dtype, _), group in groups.items()
    ]
    works = [
        Work(stack.count, solver.cost(stack.shape, jnp.dtype(stack.dtype)), roles)
        for stack, (*_, roles) in zip(stacks, groups, strict=True)
    ]
    return [
        SharedStack(stack, _exchange(owners, group))
        for stack, owners, group in zip(
            stacks, assign_owners(works, mesh), groups.values(), strict=True
        )
    ]


def _exchange(owners: Any, group: list[tuple[Part, BlockLayout]]) -> Exchange:
    layouts = list(dict.fromkeys(layout for _, layout in group))
    counts = [part.view.count for part, _ in group]
    kinds = np.repeat([layouts.index(layout) for _, layout in group], counts)
    return Exchange(owners, tuple(layouts), kinds.astype(np.int32))


def _send_to_owners(
    solver: Solver, stack: Stack, exchange: Exchange, leaves: Sequence[jax.Array]
) -> jax.Array:
    """What this device iterates of a stack, `(slots, m, n)`."""
    wire = solver.wire_dtype(jnp.dtype(stack.dtype))

    def to_blocks(view: MatrixView, leaf: jax.Array) -> jax.Array:
        matrices = view.to_matrices(leaf).astype(wire)
        return matrices.reshape(-1, *exchange.block_shape)

    return exchange.to_owners(stack.gather(leaves, to_blocks))


def _zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """0, but known only when all arrays are there."""
    numbers = [jnp.isnan(x[0, 0, 0]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)


def _iterate_own(
    solver: Solver,
    stack: Stack,
    exchange: Exchange,
    matrices: jax.Array,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def orthogonalize(x: jax.Array) -> jax.Array:
        # The dtype of the iteration follows from that of the leaf, not of the wire.
        return solver.orthogonalize(x.astype(stack.dtype))

    count = exchange.count()
    if isinstance(count, jax.Array):
        return solver.map_first(orthogonalize, matrices, count, zero)
    return solver.map(orthogonalize, matrices).astype(matrices.dtype), zero

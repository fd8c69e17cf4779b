"""Orthogonalization shared out over a mesh.

Blocks of leaves -> whole matrices, each on one device -> iterated there -> blocks. What
travels does so once for each stack and way, and nothing travels in between.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._matrices.view import MatrixView
from .._newton_schulz.batches import map_chunks, map_first
from .._newton_schulz.options import Options
from .._newton_schulz.platforms import CHUNK_SIZE, cost, Platform, wire_dtype
from .._newton_schulz.solver import iterate, prepare
from .block_layout import Layout, layout, local_view, Route, route
from .exchange import Exchange
from .ownership import Owners, share_out, Work


class Part(NamedTuple):
    """One leaf's matrices in a stack."""

    leaf: int
    view: MatrixView  # of what one device holds
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape and dtype that the same devices share out."""

    shape: tuple[int, int]
    dtype: str
    route: Route
    parts: list[Part]

    @property
    def count(self) -> int:
        return sum(part.view.count for part in self.parts)


def orthogonalize_on_mesh(
    leaves: Sequence[jax.Array],
    ns_steps: jax.Array | None,
    *,
    views: Sequence[MatrixView],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec],
    options: Options,
    platform: Platform,
) -> list[jax.Array]:
    """Orthogonalizes leaves that lie on `mesh` as `specs` say, and leaves them so."""
    function = shared_out(
        [leaf.dtype for leaf in leaves],
        views=views,
        mesh=mesh.shape,
        specs=specs,
        options=options,
        platform=platform,
    )
    here = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(list(specs), PartitionSpec()),
        out_specs=list(specs),
        check_vma=False,
    )
    return here(list(leaves), ns_steps)


def shared_out(
    dtypes: Sequence[jnp.dtype],
    *,
    views: Sequence[MatrixView],
    mesh: Mapping[str, int],
    specs: Sequence[PartitionSpec],
    options: Options,
    platform: Platform,
) -> Callable[[Sequence[jax.Array], jax.Array | None], list[jax.Array]]:
    """What one device does: from its blocks of all leaves to what becomes of them.

    `mesh` maps names of axes to sizes.
    """
    stacks = plan_stacks(dtypes, views, specs, mesh)
    exchanges = plan_exchanges(stacks, mesh, options, platform)

    pairs = list(zip(stacks, exchanges, strict=True))
    settings = options, platform

    # Between the two exchanges of all stacks no device waits for another: who has
    # nothing in one stack starts on what it has in the next. A barrier would not do,
    # since compilers drop it before they put operations in order.
    def function(leaves, ns_steps):
        received = [_receive(*pair, leaves, *settings) for pair in pairs]
        zero, shares = _zero_after(received), []
        for i, (pair, matrices) in enumerate(zip(pairs, received, strict=True)):
            # A name by which benchmarks know its loop.
            with jax.named_scope(f"stack{i}"):
                share, zero = _iterate_share(*pair, matrices, ns_steps, *settings, zero)
            shares.append(share)
        results = list(leaves)
        for (stack, exchange), share in zip(pairs, shares, strict=True):
            blocks = exchange.to_blocks(share + zero.astype(share.dtype))
            _scatter(stack, blocks, results)
        return results

    return function


def _zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """0, but known only when all arrays are there."""
    numbers = [jnp.isnan(x[0, 0, 0]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)


def plan_stacks(
    dtypes: Sequence[jnp.dtype],
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
) -> list[Stack]:
    stacks: dict[tuple, Stack] = {}
    for i, (dtype, view, spec) in enumerate(zip(dtypes, views, specs, strict=True)):
        part = Part(i, local_view(view, spec, mesh), layout(view, spec, mesh))
        key = part.layout.shape, jnp.dtype(dtype).name, route(view, spec, mesh)
        stacks.setdefault(key, Stack(*key, [])).parts.append(part)
    return list(stacks.values())


def plan_exchanges(
    stacks: Sequence[Stack],
    mesh: Mapping[str, int],
    options: Options,
    platform: Platform,
) -> list[Exchange]:
    works = [
        Work(
            stack.count,
            cost(stack.shape, jnp.dtype(stack.dtype), options, platform),
            stack.route,
        )
        for stack in stacks
    ]
    return [
        _exchange(stack, owners)
        for stack, owners in zip(stacks, share_out(works, mesh), strict=True)
    ]


def _exchange(stack: Stack, owners: Owners) -> Exchange:
    layouts = list(dict.fromkeys(part.layout for part in stack.parts))
    kinds = [
        np.full(part.view.count, layouts.index(part.layout), np.int32)
        for part in stack.parts
    ]
    return Exchange(stack.route, owners, tuple(layouts), np.concatenate(kinds))


def _receive(
    stack: Stack,
    exchange: Exchange,
    leaves: Sequence[jax.Array],
    options: Options,
    platform: Platform,
) -> jax.Array:
    """What this device iterates of a stack, `(slots, m, n)`."""
    wire = wire_dtype(jnp.dtype(stack.dtype), options, platform)
    blocks = [
        part.view.to_matrices(leaves[part.leaf])
        .astype(wire)
        .reshape(-1, *exchange.block_shape)
        for part in stack.parts
    ]
    return exchange.to_owners(
        blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks)
    )


def _iterate_share(
    stack: Stack,
    exchange: Exchange,
    matrices: jax.Array,
    ns_steps: jax.Array | None,
    options: Options,
    platform: Platform,
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def orthogonalize(x: jax.Array) -> jax.Array:
        # The dtype of the iteration follows from that of the leaf, not of the wire.
        ready = prepare(x.astype(stack.dtype), options, platform)
        return iterate(ready, ns_steps, options, platform)

    count, chunk_size = exchange.count(), CHUNK_SIZE[platform]
    if isinstance(count, jax.Array):
        return map_first(orthogonalize, matrices, chunk_size, count, zero)
    shares = map_chunks(orthogonalize, matrices, chunk_size)
    return shares.astype(matrices.dtype), zero


def _scatter(stack: Stack, blocks: jax.Array, results: list[jax.Array]) -> None:
    dtype = jnp.promote_types(stack.dtype, jnp.float32)
    counts = [part.view.count for part in stack.parts]
    split = jnp.split(blocks, np.cumsum(counts[:-1]))
    for part, mine in zip(stack.parts, split, strict=True):
        shape = part.view.fan_in, part.view.fan_out
        leaf = part.view.from_matrices(mine.reshape(-1, *shape))
        results[part.leaf] = leaf.astype(dtype)

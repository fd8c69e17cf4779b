"""A stack's way from blocks to whole matrices at their owners, and back."""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._jax_versions import gather_everywhere
from .block_layout import AxisRoles, BlockLayout
from .ownership import Owners


#: The most owners whose blocks are copied run by run: each run is an operation.
MOST_RUNS = 16


class Exchange(Protocol):
    """One stack's way, inside `jax.shard_map`."""

    @property
    def owners(self) -> Owners: ...

    @property
    def roles(self) -> AxisRoles:
        """The role of each axis of the mesh."""
        ...

    @property
    def block_shape(self) -> tuple[int, int]:
        """The shape in which blocks are sent, whatever part of the matrix they are."""
        ...

    def to_owners(self, blocks: jax.Array) -> jax.Array:
        """This device's blocks `(matrices, ...)` to its share of whole ones, `(slots,
        m, n)`. A slot of no matrix is undefined.
        """
        ...

    def to_blocks(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `to_owners`."""
        ...

    def count(self) -> jax.Array | None:
        """The number of matrices this device iterates, the first ones; None if all."""
        ...


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Every device sends as many blocks to each other, whether or not it needs them.

    That is one operation of every backend. What pads is at most `MOST_SLOTS` times what
    is needed. `kinds` says which of `layouts` each matrix of the stack has; the mesh's
    axes have the same roles in all of them.
    """

    owners: Owners
    roles: AxisRoles
    layouts: tuple[BlockLayout, ...]
    kinds: np.ndarray

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.layouts[0].block_shape

    def to_owners(self, blocks: jax.Array) -> jax.Array:
        group, copy, _ = self._here()
        owners = self.owners
        if self._in_runs:
            blocks = jnp.pad(blocks, [(0, owners.beyond), (0, 0), (0, 0)])
            starts = jnp.asarray(_at(owners.starts, group, copy))
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, blocks)
            sent = jnp.stack([cut(start, owners.most) for start in starts])
        else:
            table = _at(owners.slots, group, copy)  # (devices, slots)
            sent = _take(blocks, table.reshape(-1))
            sent = sent.reshape(*table.shape, *self.block_shape)
        # Of each slot the blocks from all devices are next to each other.
        received = jnp.moveaxis(self._all_to_all(sent), 1, 0)
        return self._by_kind([layout.join(received) for layout in self.layouts])

    def to_blocks(self, matrices: jax.Array) -> jax.Array:
        split = self._by_kind(
            [
                layout.split(matrices).reshape(
                    len(matrices), layout.devices, *self.block_shape
                )
                for layout in self.layouts
            ]
        )
        returned = self._all_to_all(jnp.moveaxis(split, 1, 0))
        # Copies of a block are at several devices, but each matrix was iterated at one:
        # copies hand their results to each other.
        if self.roles.replicated:
            returned = gather_everywhere(returned, self.roles.replicated)
        group, *_ = self._here()
        if not self._in_runs:
            blocks = returned.reshape(-1, *self.block_shape)
            return _take(blocks, _at(self.owners.places, group))
        runs = returned.reshape(-1, self.owners.most, *self.block_shape)
        starts = jnp.asarray(_at(self.owners.starts, group)).reshape(-1)
        count = len(self.kinds)
        blocks = jax.lax.empty(
            (count + self.owners.beyond, *self.block_shape), runs.dtype
        )
        for member in _at(self.owners.order, group):
            # What is undefined after one run is where the next one is written.
            run = jax.lax.dynamic_index_in_dim(runs, member, keepdims=False)
            blocks = jax.lax.dynamic_update_slice_in_dim(blocks, run, starts[member], 0)
        return blocks[:count]

    @property
    def _in_runs(self) -> bool:
        """True if blocks are copied owner by owner, and not one by one.

        Those of an owner are in a row. XLA's gather for TPU cuts them to fit its
        memory, which for Kimi K2 on 1,024 v5p takes 310 million cycles in place of 256.
        """
        copies = self.owners.counts.shape[1]
        are_in_place = copies == 1 and self.owners.are_even
        return not are_in_place and self.owners.order.shape[1] <= MOST_RUNS

    def count(self) -> jax.Array | None:
        if self.owners.are_even:
            return None
        return jnp.asarray(_at(self.owners.counts, *self._here()))

    def _all_to_all(self, blocks: jax.Array) -> jax.Array:
        """Block `i` is sent to device `i`."""
        if not self.roles.sharded:
            return blocks
        return jax.lax.all_to_all(blocks, self.roles.sharded, 0, 0, tiled=True)

    def _by_kind(self, results: list[jax.Array]) -> jax.Array:
        """Picks for each slot the result for the layout that its matrix has."""
        if len(results) == 1:
            return results[0]
        # All are computed, and one is chosen. That is cheaper than a branch for each
        # slot, which would be a loop, and what is computed is only moved.
        kinds = jnp.asarray(_at(self.kinds[self.owners.slots], *self._here()))
        chosen = results[0]
        for i, result in enumerate(results[1:], 1):
            is_it = (kinds == i).reshape(-1, *[1] * (result.ndim - 1))
            chosen = jnp.where(is_it, result, chosen)
        return chosen

    def _here(self) -> tuple[jax.Array | int, ...]:
        """This device's group, its copy in the group, and its place in the copy."""
        return tuple(jax.lax.axis_index(axes) if axes else 0 for axes in self.roles)


def _at(table: np.ndarray, *indices: jax.Array | int) -> np.ndarray | jax.Array:
    """The entry of a table, known when compiling if it is the same everywhere."""
    entries = table.reshape(-1, *table.shape[len(indices) :])
    if (entries == entries[0]).all():
        return entries[0]
    return jnp.asarray(table)[indices]


def _take(x: jax.Array, indices: np.ndarray | jax.Array) -> jax.Array:
    if isinstance(indices, np.ndarray) and np.array_equal(indices, np.arange(len(x))):
        return x
    return jnp.take(x, jnp.asarray(indices), axis=0, mode="clip")

"""Blocks to whole matrices at their owners, and back: inside `jax.shard_map`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._jax_versions import gather_everywhere
from .block_layout import AxisRoles, BlockLayout
from .ownership import Owners


Slots = slice  # of those that every device has in a stack

#: The most owners for each of whom a slice is cut out of the blocks. For more of them
#: blocks are gathered one by one, which takes longer and is one operation.
MOST_SLICES = 16


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One stack's way. `kinds` says which of `layouts` each of its matrices has.

    The mesh's axes have the same roles in all layouts.
    """

    owners: Owners
    layouts: tuple[BlockLayout, ...]
    kinds: np.ndarray

    @property
    def roles(self) -> AxisRoles:
        return self.layouts[0].roles

    @property
    def block_shape(self) -> tuple[int, int]:
        """How blocks travel, whatever part of the matrix they are."""
        return self.layouts[0].block_shape

    @property
    def is_even(self) -> bool:
        """Whether all devices own as many matrices."""
        return bool((self.owners.counts == self.owners.most).all())

    @property
    def padding(self) -> int:
        """How many blocks `collect` wants behind those of the stack."""
        return self.owners.beyond if self._in_slices else 0

    def count(self) -> jax.Array:
        """How many matrices of its stack this device iterates: the first ones."""
        group, copy, device = self._here()
        return jnp.asarray(_at(self.owners.counts, group, copy, device))

    def pieces(self, most: Callable[[int], int]) -> list[Slots]:
        """Slots cut into pieces that travel one after the other.

        They are one where devices own different numbers of matrices: cut, these would
        wait for each other.
        """
        slots = self.owners.most
        numbers = np.array_split(np.arange(slots), most(slots) if self.is_even else 1)
        return [slice(of[0], of[-1] + 1) for of in numbers]

    def collect(self, blocks: jax.Array, piece: Slots) -> jax.Array:
        """What this device sends to each owner of the blocks `(matrices, ...)`."""
        group, copy, _ = self._here()
        if self._in_slices:
            starts = _at(self.owners.starts, group, copy) + piece.start
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, blocks)
            return jnp.stack([cut(at, piece.stop - piece.start) for at in starts])
        slots = _at(self.owners.slots[..., piece], group, copy)
        sent = _take(blocks, slots.reshape(-1))
        return sent.reshape(*slots.shape, *blocks.shape[1:])

    def to_owners(self, collected: jax.Array, piece: Slots) -> jax.Array:
        """What all collected to this device's share, `(slots, m, n)`.

        Unused slots are undefined.
        """
        received = jnp.moveaxis(self._all_to_all(collected), 1, 0)
        joins = [x.join for x in self.layouts]
        return self._by_layout(joins, self._kinds_here(piece), received)

    def to_sources(self, matrices: jax.Array, piece: Slots) -> jax.Array:
        """Matrices `(slots, m, n)` to blocks `(copies, owners, slots, ...)`."""
        splits = [self._split(layout) for layout in self.layouts]
        split = self._by_layout(splits, self._kinds_here(piece), matrices)
        blocks = self._all_to_all(jnp.moveaxis(split, 1, 0))
        if self.roles.replicated:
            blocks = gather_everywhere(blocks, self.roles.replicated)
        return blocks.reshape(-1, *blocks.shape[-3:])

    def to_blocks(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """What came back to the blocks `(matrices, ...)` that were collected."""
        group, *_ = self._here()
        blocks = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
        if self._in_slices:
            runs = blocks.reshape(-1, self.owners.most, *self.block_shape)
            return self._join_runs(runs, group)
        blocks = blocks.reshape(-1, *self.block_shape)
        return _take(blocks, _at(self.owners.places, group))

    def _join_runs(self, runs: jax.Array, group: jax.Array | int) -> jax.Array:
        starts = _at(self.owners.starts, group).reshape(-1)
        count = len(self.kinds)
        joined = jax.lax.empty((count + self.padding, *self.block_shape), runs.dtype)
        for member in _at(self.owners.order, group):
            # What is undefined behind one run is where the next one goes.
            run = jax.lax.dynamic_index_in_dim(runs, member, keepdims=False)
            joined = jax.lax.dynamic_update_slice_in_dim(joined, run, starts[member], 0)
        return joined[:count]

    @property
    def _in_slices(self) -> bool:
        copies = self.owners.counts.shape[1]
        are_in_place = copies == 1 and self.is_even
        return not are_in_place and self.owners.order.shape[1] <= MOST_SLICES

    def _kinds_here(self, piece: Slots) -> np.ndarray | jax.Array:
        return _at(self._kinds_of_slots[..., piece], *self._here())

    def _here(self) -> tuple[jax.Array | int, ...]:
        return tuple(
            jax.lax.axis_index(axes) if axes else 0 for axes in self.roles.in_order
        )

    def _all_to_all(self, blocks: jax.Array) -> jax.Array:
        """Block `i` goes to device `i`."""
        if not self.roles.sharded:
            return blocks
        return jax.lax.all_to_all(blocks, self.roles.sharded, 0, 0, tiled=True)

    def _split(self, layout: BlockLayout) -> Callable[[jax.Array], jax.Array]:
        return lambda matrix: layout.split(matrix).reshape(-1, *self.block_shape)

    def _by_layout(self, functions, kinds, stack: jax.Array) -> jax.Array:
        """Applies to every item of a stack the function of its kind."""
        if len(functions) == 1:
            return jax.vmap(functions[0])(stack)
        return jax.lax.map(
            lambda x: jax.lax.switch(x[0], functions, x[1]), (kinds, stack)
        )

    @property
    def _kinds_of_slots(self) -> np.ndarray:
        return self.kinds[self.owners.slots]


def _at(table: np.ndarray, *indices: jax.Array | int) -> np.ndarray | jax.Array:
    """The entry of a table, known when compiling if it is the same everywhere."""
    depth = len(indices)
    entries = table.reshape(-1, *table.shape[depth:])
    if (entries == entries[0]).all():
        return entries[0]
    return jnp.asarray(table)[indices]


def _take(x: jax.Array, indices: np.ndarray | jax.Array) -> jax.Array:
    if isinstance(indices, np.ndarray) and np.array_equal(indices, np.arange(len(x))):
        return x
    return jnp.take(x, jnp.asarray(indices), axis=0, mode="clip")

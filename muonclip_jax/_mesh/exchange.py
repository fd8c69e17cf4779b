"""Blocks to whole matrices at their owners, and back: inside `jax.shard_map`."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._jax_versions import gather_everywhere
from .block_layout import AxisRoles, BlockLayout
from .ownership import Owners


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

    def count(self) -> jax.Array | np.ndarray:
        """How many matrices of its stack this device iterates: the first ones."""
        group, copy, device = self._here()
        return _at(self.owners.counts, group, copy, device)

    def to_owners(self, blocks: jax.Array) -> jax.Array:
        """Blocks `(matrices, ...)` to this device's share, `(slots, m, n)`.

        Unused slots are undefined.
        """
        group, copy, device = self._here()
        slots = _at(self.owners.slots, group, copy)
        sent = _take(blocks, slots.reshape(-1)).reshape(*slots.shape, *blocks.shape[1:])
        received = jnp.moveaxis(self._all_to_all(sent), 1, 0)
        kinds = _at(self._kinds_of_slots, group, copy, device)
        return self._by_layout([x.join for x in self.layouts], kinds, received)

    def to_blocks(self, matrices: jax.Array) -> jax.Array:
        """The way back: matrices `(slots, m, n)` to blocks `(matrices, ...)`."""
        group, copy, device = self._here()
        kinds = _at(self._kinds_of_slots, group, copy, device)
        splits = [self._split(layout) for layout in self.layouts]
        split = self._by_layout(splits, kinds, matrices)
        blocks = self._all_to_all(jnp.moveaxis(split, 1, 0))
        if self.roles.replicated:
            blocks = gather_everywhere(blocks, self.roles.replicated)
        blocks = blocks.reshape(-1, *self.block_shape)
        return _take(blocks, _at(self.owners.places, group))

    def _here(self) -> tuple[jax.Array | int, ...]:
        return tuple(jax.lax.axis_index(axes) if axes else 0 for axes in self.roles)

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

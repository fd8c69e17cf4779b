"""An exchange in which every device sends as much to each other, padding included."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._jax_versions import gather_everywhere
from .block_layout import BlockLayout
from .exchange import at, Exchange, Slots


#: The most owners for each of whom a slice is cut out of the blocks. For more of them
#: blocks are gathered one by one, which takes longer and is one operation.
MOST_SLICES = 16


@dataclasses.dataclass(frozen=True)
class PaddedExchange(Exchange):
    """`kinds` says which of `layouts` each matrix of the stack has.

    The mesh's axes have the same roles in all layouts.
    """

    layouts: tuple[BlockLayout, ...]
    kinds: np.ndarray

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.layouts[0].block_shape

    @property
    def padding(self) -> int:
        return self.owners.beyond if self._in_slices else 0

    def to_owners(self, blocks: jax.Array, slots: Slots) -> jax.Array:
        received = jnp.moveaxis(self._all_to_all(self._collect(blocks, slots)), 1, 0)
        joins = [x.join for x in self.layouts]
        return self._by_layout(joins, self._kinds_here(slots), received)

    def nothing_yet(self, blocks: jax.Array) -> list[jax.Array]:
        return []

    def to_sources(
        self, matrices: jax.Array, slots: Slots, returned: list[jax.Array]
    ) -> list[jax.Array]:
        """Adds blocks `(copies * owners, slots, ...)`."""
        splits = [self._split(layout) for layout in self.layouts]
        split = self._by_layout(splits, self._kinds_here(slots), matrices)
        blocks = self._all_to_all(jnp.moveaxis(split, 1, 0))
        if self.roles.replicated:
            blocks = gather_everywhere(blocks, self.roles.replicated)
        return [*returned, blocks.reshape(-1, *blocks.shape[-3:])]

    def to_blocks(self, returned: Sequence[jax.Array]) -> jax.Array:
        group, *_ = self.here()
        is_one = len(returned) == 1
        blocks = returned[0] if is_one else jnp.concatenate(returned, axis=1)
        if self._in_slices:
            runs = blocks.reshape(-1, self.owners.most, *self.block_shape)
            return self._join_runs(runs, group)
        blocks = blocks.reshape(-1, *self.block_shape)
        return _take(blocks, at(self.owners.places, group))

    def _collect(self, blocks: jax.Array, slots: Slots) -> jax.Array:
        """What this device sends to each owner."""
        group, copy, _ = self.here()
        if self._in_slices:
            starts = at(self.owners.starts, group, copy) + slots.start
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, blocks)
            return jnp.stack([cut(start, slots.length) for start in starts])
        table = self.owners.slots[..., slots.start : slots.start + slots.length]
        owned = at(table, group, copy)
        sent = _take(blocks, owned.reshape(-1))
        return sent.reshape(*owned.shape, *blocks.shape[1:])

    def _join_runs(self, runs: jax.Array, group: jax.Array | int) -> jax.Array:
        starts = jnp.asarray(at(self.owners.starts, group)).reshape(-1)
        count = len(self.kinds)
        joined = jax.lax.empty((count + self.padding, *self.block_shape), runs.dtype)
        for member in at(self.owners.order, group):
            # What is undefined behind one run is where the next one goes.
            run = jax.lax.dynamic_index_in_dim(runs, member, keepdims=False)
            joined = jax.lax.dynamic_update_slice_in_dim(joined, run, starts[member], 0)
        return joined[:count]

    @property
    def _in_slices(self) -> bool:
        copies = self.owners.counts.shape[1]
        are_in_place = copies == 1 and self.is_even
        return not are_in_place and self.owners.order.shape[1] <= MOST_SLICES

    def _kinds_here(self, slots: Slots) -> np.ndarray | jax.Array:
        kinds = self.kinds[self.owners.slots]
        table = kinds[..., slots.start : slots.start + slots.length]
        return at(table, *self.here())

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


def _take(x: jax.Array, indices: np.ndarray | jax.Array) -> jax.Array:
    if isinstance(indices, np.ndarray) and np.array_equal(indices, np.arange(len(x))):
        return x
    return jnp.take(x, jnp.asarray(indices), axis=0, mode="clip")

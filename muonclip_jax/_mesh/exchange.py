"""A stack's way from blocks to whole matrices at their owners, and back.

Blocks are what a device of the mesh holds of each matrix of a stack. An exchange is one
class in `EXCHANGES`; to add one is to write a class like `AllToAll` and enter it there.
"""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from .._axes import gather_everywhere
from .block_layout import AxisRoles, BlockLayout
from .ownership import Owners


#: The most owners whose blocks are copied run by run: each run is an operation.
MOST_RUNS = 16


@dataclasses.dataclass(frozen=True)
class Exchange(abc.ABC):
    """One stack's way, inside `jax.shard_map`.

    - `owners`: who iterates each matrix.
    - `roles`: what each axis of the mesh does to the stack, the same for all leaves.
    - `layouts`: the ways in which the mesh cuts matrices of the stack, whose blocks all
        have as many entries. Usually one; two where tall and wide leaves share a stack.
    - `kinds`: for each matrix which of the `layouts` it has.
    """

    owners: Owners
    roles: AxisRoles
    layouts: tuple[BlockLayout, ...]
    kinds: np.ndarray

    @classmethod
    def serves(cls, owners: Owners, roles: AxisRoles) -> bool:
        """True for stacks that this exchange is for."""
        del owners, roles
        return True

    @abc.abstractmethod
    def to_owners(self, blocks: jax.Array) -> jax.Array:
        """This device's blocks `(matrices, *block_shape)` to its share of whole ones,
        `(slots, m, n)`. A slot of no matrix is undefined.
        """

    @abc.abstractmethod
    def to_blocks(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `to_owners`, on every device that has blocks of a matrix."""

    @property
    def block_shape(self) -> tuple[int, int]:
        """The shape in which blocks are sent, whatever part of the matrix they are."""
        return self.layouts[0].block_shape

    def count(self) -> jax.Array | None:
        """The number of matrices this device iterates, the first ones; None if all."""
        if self.owners.are_even:
            return None
        return jnp.asarray(entry_at(self.owners.counts, *self.here()))

    def here(self) -> tuple[jax.Array | int, ...]:
        """This device's group, its copy in the group, and its place in the copy."""
        return tuple(jax.lax.axis_index(axes) if axes else 0 for axes in self.roles)


class AllToAll(Exchange):
    """Every device sends as many blocks to each other, whether or not it needs them.

    That is one operation of every backend. What pads is at most `MOST_SLOTS` times what
    is needed. One that sends no padding (`jax.lax.ragged_all_to_all`) was worth 1.04 to
    1.33 times, by the estimates of TPU's compiler, for 1.1 to 2 times the temporaries.
    """

    def to_owners(self, blocks: jax.Array) -> jax.Array:
        group, copy, _ = self.here()
        owners = self.owners
        if self._in_runs:
            blocks = jnp.pad(blocks, [(0, owners.beyond), (0, 0), (0, 0)])
            starts = jnp.asarray(entry_at(owners.starts, group, copy))
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, blocks)
            sent = jnp.stack([cut(start, owners.most) for start in starts])
        else:
            # For each device the matrices of its slots, so that what is taken is in the
            # order in which `all_to_all` sends it.
            table = entry_at(owners.slots, group, copy)  # (devices, slots)
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
        group, *_ = self.here()
        if not self._in_runs:
            blocks = returned.reshape(-1, *self.block_shape)
            return _take(blocks, entry_at(self.owners.places, group))
        runs = returned.reshape(-1, self.owners.most, *self.block_shape)
        starts = jnp.asarray(entry_at(self.owners.starts, group)).reshape(-1)
        count = len(self.kinds)
        blocks = jax.lax.empty(
            (count + self.owners.beyond, *self.block_shape), runs.dtype
        )
        for member in entry_at(self.owners.order, group):
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
        kinds = jnp.asarray(entry_at(self.kinds[self.owners.slots], *self.here()))
        chosen = results[0]
        for i, result in enumerate(results[1:], 1):
            is_it = (kinds == i).reshape(-1, *[1] * (result.ndim - 1))
            chosen = jnp.where(is_it, result, chosen)
        return chosen


#: An exchange serves the stacks that none before it does.
EXCHANGES: list[type[Exchange]] = [AllToAll]


def entry_at(table: np.ndarray, *indices: jax.Array | int) -> np.ndarray | jax.Array:
    """The entry of a table, known when compiling if it is the same everywhere."""
    entries = table.reshape(-1, *table.shape[len(indices) :])
    if (entries == entries[0]).all():
        return entries[0]
    return jnp.asarray(table)[indices]


def _take(x: jax.Array, indices: np.ndarray | jax.Array) -> jax.Array:
    if isinstance(indices, np.ndarray) and np.array_equal(indices, np.arange(len(x))):
        return x
    return jnp.take(x, jnp.asarray(indices), axis=0, mode="clip")

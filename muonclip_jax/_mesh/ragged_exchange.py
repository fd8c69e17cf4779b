"""An exchange in which every device sends to each other just what that one owns.

Blocks of the matrices that a device owns lie in a row at all others. They leave from
where they are and arrive where they belong: nothing is collected, padded or reordered.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .block_layout import BlockLayout
from .exchange import at, Exchange, Slots


#: The most operations of an exchange. More slots have one, whatever their size.
MOST_OPERATIONS = 4


@dataclasses.dataclass(frozen=True)
class RaggedExchange(Exchange):
    """For matrices of one layout, of which all devices along `roles.sharded` hold a
    block, and no others one of the same.

    If matrices are `large`, a few travel one by one: the blocks of each then arrive
    beside each other. Else they are put together afterwards.
    """

    layout: BlockLayout
    large: bool

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.layout.block_shape

    def to_owners(self, blocks: jax.Array, slots: Slots) -> jax.Array:
        devices, length = self.layout.devices, slots.length
        _, _, me = self.here()
        starts, counts = self._starts_and_counts()
        shape = (devices * length, *self.block_shape)
        received = jax.lax.empty(shape, blocks.dtype)
        for first, each in self._operations(slots):
            received = self._send(
                blocks,
                received,
                jnp.clip(starts + each.start, 0, len(blocks)),
                _sizes(counts, each),
                jnp.full(devices, devices * first + me * each.length),
                jnp.broadcast_to(_sizes(counts[me], each), devices),
            )
        if self._one_by_one(length):
            received = received.reshape(length, devices, *self.block_shape)
        else:
            received = received.reshape(devices, length, *self.block_shape)
            received = jnp.moveaxis(received, 1, 0)
        return jax.vmap(self.layout.join)(received)

    def nothing_yet(self, blocks: jax.Array) -> jax.Array:
        return blocks  # Each takes the place of the one that left.

    def to_sources(
        self, matrices: jax.Array, slots: Slots, returned: jax.Array
    ) -> jax.Array:
        devices = self.layout.devices
        _, _, me = self.here()
        starts, counts = self._starts_and_counts()
        split = jax.vmap(self.layout.split)(matrices)
        if not self._one_by_one(slots.length):
            split = jnp.moveaxis(split, 1, 0)
        sent = split.reshape(-1, *self.block_shape)
        for first, each in self._operations(slots):
            returned = self._send(
                sent,
                returned,
                devices * first + each.length * jnp.arange(devices),
                jnp.broadcast_to(_sizes(counts[me], each), devices),
                jnp.full(devices, jnp.clip(starts[me] + each.start, 0, len(returned))),
                _sizes(counts, each),
            )
        return returned

    def to_blocks(self, returned: jax.Array) -> jax.Array:
        return returned

    def _operations(self, slots: Slots) -> list[tuple[int, Slots]]:
        """What travels at once, and how many slots before."""
        if not self._one_by_one(slots.length):
            return [(0, slots)]
        return [(i, Slots(slots.start + i, 1)) for i in range(slots.length)]

    def _one_by_one(self, length: int) -> bool:
        return self.large and length <= MOST_OPERATIONS

    def _starts_and_counts(self) -> tuple[jax.Array, jax.Array]:
        """Of the devices along `roles.sharded`."""
        group, copy, _ = self.here()
        tables = self.owners.starts, self.owners.counts
        starts, counts = (jnp.asarray(at(x, group, copy)) for x in tables)
        return starts, counts

    def _send(self, operand: jax.Array, output: jax.Array, *places: jax.Array):
        """`places`: where what goes to each starts and its size, then where it lands
        there, and how much each sends here.
        """
        places = tuple(x.astype(jnp.int32) for x in places)
        return jax.lax.ragged_all_to_all(
            operand, output, *places, axis_name=self.roles.sharded
        )


def _sizes(counts: jax.Array, slots: Slots) -> jax.Array:
    """How many of the slots are owned: none of those before the first."""
    return jnp.where(
        slots.start < 0, 0, jnp.clip(counts - slots.start, 0, slots.length)
    )

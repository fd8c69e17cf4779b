"""An exchange in which every device sends to each other just what that one owns.

Blocks of the matrices that a device owns lie in a row at all others. They leave from
where they are and arrive where they belong: nothing is collected, padded or reordered.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .block_layout import BlockLayout
from .exchange import at, Exchange, Slots


class Messages(NamedTuple):
    """Tables `(owners, slots)`, or `(sources, slots)` at the owner `me`."""

    me: jax.Array | int
    in_stack: jax.Array  # by owner: where the block is among those of the stack
    owned: jax.Array  # by owner: 1, or 0 where it has no matrix in the slot
    joined: jax.Array  # by source: where its block is at the owner

    def mine(self, table: jax.Array) -> jax.Array:
        """This device's row, once for each other device."""
        return jnp.broadcast_to(table[self.me], table.shape)


@dataclasses.dataclass(frozen=True)
class RaggedExchange(Exchange):
    """For matrices of one layout, of which all devices along `roles.sharded` hold a
    block, and no others one of the same.

    All slots travel in one operation. Every block is a message of its own, so that the
    blocks of each matrix arrive beside each other.
    """

    layout: BlockLayout

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.layout.block_shape

    def to_owners(
        self, blocks: jax.Array, slots: Slots, into: jax.Array | None = None
    ) -> jax.Array:
        """They take the place of the matrices `into`, if given."""
        its = self._messages(slots, len(blocks))
        shape = slots.length, self.layout.devices, *self.block_shape
        new = jax.lax.empty(shape, blocks.dtype) if into is None else self._split(into)
        received = self._send(
            blocks,
            new.reshape(-1, *self.block_shape),
            its.in_stack,
            its.owned,
            its.mine(its.joined),
            its.mine(its.owned),
        )
        return jax.vmap(self.layout.join)(received.reshape(shape))

    def nothing_yet(self, blocks: jax.Array) -> jax.Array:
        return blocks  # Each takes the place of the one that left.

    def to_sources(
        self, matrices: jax.Array, slots: Slots, returned: jax.Array
    ) -> jax.Array:
        its = self._messages(slots, len(returned))
        return self._send(
            self._split(matrices).reshape(-1, *self.block_shape),
            returned,
            its.joined,
            its.mine(its.owned),
            its.mine(its.in_stack),
            its.owned,
        )

    def to_blocks(self, returned: jax.Array) -> jax.Array:
        return returned

    def _split(self, matrices: jax.Array) -> jax.Array:
        return jax.vmap(self.layout.split)(matrices)

    def _messages(self, slots: Slots, blocks: int) -> Messages:
        """Nobody owns a slot before the first."""
        group, copy, me = self.here()
        tables = self.owners.starts, self.owners.counts
        starts, counts = (jnp.asarray(at(x, group, copy))[:, None] for x in tables)
        slot = slots.start + jnp.arange(slots.length)
        devices = jnp.arange(self.layout.devices)[:, None]
        return Messages(
            me,
            in_stack=jnp.clip(starts + slot, 0, blocks - 1),
            owned=(slot >= 0) & (slot < counts),
            joined=jnp.arange(slots.length) * self.layout.devices + devices,
        )

    def _send(self, operand: jax.Array, output: jax.Array, *tables: jax.Array):
        """`tables`, by the other device and by slot: where a block starts and how many
        leave, none or one, then where it lands there, and how many arrive from there.
        """
        arguments = [x.astype(jnp.int32).reshape(-1) for x in tables]
        return jax.lax.ragged_all_to_all(
            operand, output, *arguments, axis_name=self.roles.sharded
        )

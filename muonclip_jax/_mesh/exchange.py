"""A stack's way from blocks to whole matrices at their owners, and back."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .block_layout import AxisRoles
from .ownership import Owners


class Slots(NamedTuple):
    """Some of those that every device has in a stack; `start` may be traced."""

    start: Any
    length: int


@dataclasses.dataclass(frozen=True)
class Exchange(abc.ABC):
    """One stack's way, inside `jax.shard_map`."""

    owners: Owners
    roles: AxisRoles  # of the mesh's axes

    @property
    def padding(self) -> int:
        """How many blocks `to_owners` wants behind those of the stack."""
        return 0

    @property
    @abc.abstractmethod
    def block_shape(self) -> tuple[int, int]:
        """How blocks travel, whatever part of the matrix they are."""

    @abc.abstractmethod
    def to_owners(self, blocks: jax.Array, slots: Slots) -> jax.Array:
        """This device's blocks `(matrices, ...)` to its share of whole ones, `(slots,
        m, n)`. What owns nothing is undefined.
        """

    @abc.abstractmethod
    def nothing_yet(self, blocks: jax.Array) -> Any:
        """What `to_sources` adds to at first."""

    @abc.abstractmethod
    def to_sources(self, matrices: jax.Array, slots: Slots, returned: Any) -> Any:
        """Adds matrices `(slots, m, n)` to what came back to the sources of blocks."""

    @abc.abstractmethod
    def to_blocks(self, returned: Any) -> jax.Array:
        """All that came back, as the blocks that were given."""

    @property
    def is_even(self) -> bool:
        """Whether all devices own as many matrices."""
        return bool((self.owners.counts == self.owners.most).all())

    def count(self) -> jax.Array:
        """How many matrices of its stack this device iterates: the first ones."""
        return jnp.asarray(at(self.owners.counts, *self.here()))

    def pieces(self, most: Callable[[int], int], first: int = 0) -> list[Slots]:
        """Slots, from the first on, cut into pieces that travel one after the other.

        They are one where devices own different numbers of matrices: cut, these would
        wait for each other.
        """
        count = self.owners.most - first
        numbers = np.arange(first, first + count)
        parts = np.array_split(numbers, most(count) if count and self.is_even else 1)
        return [Slots(int(part[0]), len(part)) for part in parts if len(part)]

    def here(self) -> tuple[jax.Array | int, ...]:
        """This device's group, its copy in the group, and its place in the copy."""
        return tuple(jax.lax.axis_index(axes) if axes else 0 for axes in self.roles)


def at(table: np.ndarray, *indices: jax.Array | int) -> np.ndarray | jax.Array:
    """The entry of a table, known when compiling if it is the same everywhere."""
    depth = len(indices)
    entries = table.reshape(-1, *table.shape[depth:])
    if (entries == entries[0]).all():
        return entries[0]
    return jnp.asarray(table)[indices]

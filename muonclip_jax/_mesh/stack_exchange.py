"""An exchange of one stack with the owners of its matrices.

Matrices are in slots, equally many for each owner, and are iterated as one stack, where
parcels put matrices together one by one:

    (count, *block) -> padded to slots -> all_to_all -> (slots of this device, *matrix),
    and the same backwards
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._mesh_axes import gather_everywhere
from .._newton_schulz.solver import Solver
from .owners import exchanged, joined, OwnedStack, parted


#: Up to this many owners, slices of known bounds copy the blocks, one per owner: on TPU
#: in 15 % fewer cycles than a gather.
MOST_RUNS = 16


class StackExchange:
    """One exchange of one stack."""

    def __init__(self, solver: Solver, owned: OwnedStack, mesh: Mapping[Any, int]):
        cut = owned.cut
        self.solver, self.stacks, self.mesh = solver, [owned], mesh
        self.replicated, self.sharded = cut.replicated, cut.sharded
        self.repeated, self.is_even = cut.repeated, owned.is_even
        self.dtype = solver.wire_dtype(owned.stack.dtype)
        self.counts, self.slots = owned.counts, max(1, int(owned.counts.max()))

    @property
    def trips(self) -> list[np.ndarray]:
        """How often each owner iterates some of the matrices."""
        (owned,) = self.stacks
        return [-(-self.counts // self.solver.batch_size(owned.cut.shape, self.slots))]

    @property
    def entries(self) -> int:
        """The entries that a device sends to each other."""
        return self.slots * math.prod(self.stacks[0].block)

    def arrive(self, leaves: Sequence[Sequence[jax.Array]]) -> jax.Array:
        """Sends blocks, and returns this device's matrices, `(slots, *matrix)`."""
        (blocks,), (owned,) = leaves, self.stacks
        x = self._to_slots(jnp.concatenate(blocks))
        if self.replicated:
            # Copies hold the same blocks, and each sends its part of the slots alone.
            copies = math.prod(self.mesh[axis] for axis in self.replicated)
            x = x.reshape(copies, -1, *owned.block)
            mine = jax.lax.axis_index(self.replicated)
            x = jax.lax.dynamic_index_in_dim(x, mine, keepdims=False)
        x = exchanged(x.reshape(-1, self.slots, *owned.block), self.sharded)
        return joined(x, owned, self.mesh)

    def iterate(self, matrices: jax.Array) -> jax.Array:
        """Orthogonalizes the matrices; an empty slot may hold any."""
        count = None
        if not self.is_even:
            member = jax.lax.axis_index(self.replicated + self.sharded)
            count = jnp.asarray(self.counts)[member]
        with jax.named_scope(self.stacks[0].name):
            return self.solver.orthogonalize_all(matrices, count)

    def depart(self, matrices: jax.Array) -> list[jax.Array]:
        """The inverse of `arrive`: returns `(count, *block)`."""
        (owned,) = self.stacks
        x = exchanged(parted(matrices, owned, self.mesh), self.sharded)
        x = x.reshape(-1, *owned.block)
        if self.replicated:
            x = gather_everywhere(x, self.replicated, axis=0, tiled=True)
        return [self._from_slots(x)]

    def _to_slots(self, x: jax.Array) -> jax.Array:
        """Puts matrices into slots; an empty one gets any."""
        if self.is_even:
            return x
        starts = np.cumsum(self.counts) - self.counts
        if len(self.counts) > MOST_RUNS:
            # Slots beyond the last matrix get the last one.
            sources = starts[:, None] + np.arange(self.slots)
            return jnp.take(x, np.minimum(sources, len(x) - 1).reshape(-1), axis=0)
        x = jnp.pad(x, [(0, self.slots), (0, 0), (0, 0)])
        return jnp.concatenate([x[i : i + self.slots] for i in starts.tolist()])

    def _from_slots(self, x: jax.Array) -> jax.Array:
        if self.is_even:
            return x
        if len(self.counts) > MOST_RUNS:
            filled = np.flatnonzero(np.arange(self.slots) < self.counts[:, None])
            return jnp.take(x, filled, axis=0)
        runs = ((i * self.slots, int(n)) for i, n in enumerate(self.counts))
        return jnp.concatenate([x[i : i + n] for i, n in runs if n])

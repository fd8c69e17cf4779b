"""Parcels: what is sent to the owners of matrices, and what comes back.

An all-to-all sends as much from every device to every other. With an exchange for each
stack, a device that owns few matrices of one would be sent padding. Here all that an
owner gets of some stacks is one parcel, and parcels are as even as the work is:

    blocks -> units -> parcels, one for each owner -> all_to_all -> the owner's parcel,
    where every matrix is iterated in place, and the same backwards
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._mesh_axes import gather_everywhere
from .._newton_schulz.solver import Solver
from .owners import exchanged, joined, OwnedStack, parted


#: A tile of a TPU's memory. Blocks of whole tiles are moved without a copy.
TILE = (8, 128)

#: Blocks that no tile divides are padded to whole tiles if they have more units than
#: this, since each unit takes a number in the program.
MOST_UNITS = 2**12


class Contents(NamedTuple):
    """Where a stack is in the parcels.

    - `units`: of a block.
    - `step`: the matrices that are iterated at once.
    - `first`: the unit of each owner's parcel where the stack begins.
    - `trips`: how often each owner iterates `step` of them.
    """

    stack: OwnedStack
    units: int
    step: int
    first: np.ndarray
    trips: np.ndarray


class Parcels:
    """One exchange of several stacks whose matrices the same devices divide.

    Arrays of a parcel are `(devices, units, *unit)`: its owner has as many units from
    each device that has blocks of them.
    """

    def __init__(
        self, solver: Solver, stacks: Sequence[OwnedStack], mesh: Mapping[Any, int]
    ):
        cut = stacks[0].cut
        self.solver, self.stacks, self.mesh = solver, stacks, mesh
        self.replicated, self.sharded = cut.replicated, cut.sharded
        self.repeated = cut.repeated
        self.dtype = solver.wire_dtype(stacks[0].stack.dtype)
        blocks = [x.block for x in stacks]
        self.unit = _unit_of(blocks, [x.stack.count for x in stacks])
        # The units of each parcel, numbered through a device's blocks of all stacks; -1
        # is padding.
        parcels: list[list[int]] = [[] for _ in stacks[0].counts]
        sent, self.contents, start = [0] * len(parcels), [], 0
        for stack, block in zip(stacks, blocks, strict=True):
            units = -(-math.prod(block) // math.prod(self.unit))
            counts = stack.counts
            most = max(1, int(counts.max()))
            step = solver.batch_size(stack.cut.shape, most, bool(cut.sharded))
            trips = -(-counts // step)
            first = np.array([len(parcel) for parcel in parcels], np.int32)
            self.contents.append(Contents(stack, units, step, first, trips))
            for i, (parcel, count) in enumerate(zip(parcels, counts, strict=True)):
                stop = start + int(count) * units
                parcel += range(start, stop)
                sent[i] = len(parcel) if count else sent[i]
                parcel += [-1] * (int(trips[i]) * step - int(count)) * units
                start = stop
        #: The units of a parcel as it is sent, and as its owner iterates it, with the
        #: last matrices padded to as many as are iterated at once.
        self.sent, self.kept = max(1, *sent), max(1, *map(len, parcels))
        index = np.full((len(parcels), self.sent), -1, np.int32)
        for line, parcel in zip(index, parcels, strict=True):
            line[: min(len(parcel), self.sent)] = parcel[: self.sent]
        # Padding may hold any unit.
        self.index = np.maximum(index, 0)
        filled = np.flatnonzero(index >= 0)
        self.back = np.empty(len(filled), np.int32)
        self.back[index.reshape(-1)[filled]] = filled

    @property
    def is_even(self) -> bool:
        return all(stack.is_even for stack in self.stacks)

    @property
    def trips(self) -> list[np.ndarray]:
        """How often each owner iterates some matrices of each stack."""
        return [contents.trips for contents in self.contents]

    @property
    def entries(self) -> int:
        """The entries that a device sends to each other."""
        return self.sent * math.prod(self.unit)

    def arrive(self, leaves: Sequence[Sequence[jax.Array]]) -> jax.Array:
        """Sends blocks `(count, *block)`, and returns the parcel of this device."""
        units = [self._divided(x) for blocks in leaves for x in blocks]
        x = jnp.concatenate([x.reshape(-1, *self.unit) for x in units])
        copies = math.prod(self.mesh[a] for a in self.replicated)
        # Copies hold the same blocks, and each sends its part of the parcels alone.
        index = self.index.reshape(copies, -1)
        mine = jax.lax.axis_index(self.replicated) if self.replicated else 0
        x = jnp.take(x, jnp.asarray(index)[mine], axis=0)
        x = exchanged(x.reshape(-1, self.sent, *self.unit), self.sharded)
        extra = self.kept - self.sent
        return jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * len(self.unit)])

    def iterate(self, parcel: jax.Array) -> jax.Array:
        """Orthogonalizes every matrix of a parcel in place."""
        members = self.replicated + self.sharded
        for contents in self.contents:
            size = contents.step * contents.units
            first, trips = (_here(x, members) for x in (contents.first, contents.trips))

            def replace(
                i: Any, parcel: jax.Array, contents=contents, size=size, first=first
            ):
                offset = first + i * size
                x = jax.lax.dynamic_slice_in_dim(parcel, offset, size, axis=1)
                # Without the barrier preparation would store a matrix in float32.
                x = jax.lax.optimization_barrier(self._matrices(x, contents))
                x = self.solver.orthogonalize(x).astype(parcel.dtype)
                x = self._blocks(x, contents)
                return jax.lax.dynamic_update_slice_in_dim(parcel, x, offset, axis=1)

            with jax.named_scope(contents.stack.name):
                parcel = jax.lax.fori_loop(0, trips, replace, parcel)
        return parcel

    def depart(self, parcel: jax.Array) -> list[jax.Array]:
        """The inverse of `arrive`: returns `(count, *block)` of each stack."""
        x = exchanged(parcel[:, : self.sent], self.sharded)
        x = x.reshape(-1, *self.unit)
        if self.replicated:
            x = gather_everywhere(x, self.replicated, axis=0, tiled=True)
        blocks, start = [], 0
        for contents in self.contents:
            stop = start + contents.stack.stack.count * contents.units
            y = jnp.take(x, self.back[start:stop], axis=0)
            y = y.reshape(-1, contents.units, *self.unit)
            blocks.append(self._united(y, contents.stack.block))
            start = stop
        return blocks

    def _divided(self, x: jax.Array) -> jax.Array:
        """`(..., *block)` to `(..., units, *unit)`."""
        *lead, rows, columns = x.shape
        if self.unit == (rows, columns):
            return x.reshape(*lead, 1, rows, columns)
        if not self._is_tiled((rows, columns)):
            x = x.reshape(*lead, rows * columns)
            extra = -(rows * columns) % math.prod(self.unit)
            x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, extra)])
            return x.reshape(*lead, -1, *self.unit)
        p, q = TILE
        x = x.reshape(*lead, rows // p, p, columns // q, q).swapaxes(-3, -2)
        return x.reshape(*lead, -1, *self.unit)

    def _is_tiled(self, block: tuple[int, int]) -> bool:
        return len(self.unit) > 1 and _is_tiled(block)

    def _united(self, x: jax.Array, block: tuple[int, int]) -> jax.Array:
        """The inverse of `_divided`."""
        lead = x.shape[: -len(self.unit) - 1]
        if self.unit == block:
            return x.reshape(*lead, *block)
        if not self._is_tiled(block):
            x = x.reshape(*lead, -1)[..., : math.prod(block)]
        else:
            (rows, columns), (p, q) = block, TILE
            x = x.reshape(*lead, rows // p, columns // q, p, q).swapaxes(-3, -2)
        return x.reshape(*lead, *block)

    def _matrices(self, x: jax.Array, contents: Contents) -> jax.Array:
        """`(devices, step * units, *unit)` to `(step, *matrix)`."""
        x = x.reshape(-1, contents.step, contents.units, *self.unit)
        return joined(self._united(x, contents.stack.block), contents.stack, self.mesh)

    def _blocks(self, x: jax.Array, contents: Contents) -> jax.Array:
        """The inverse of `_matrices`."""
        x = self._divided(parted(x, contents.stack, self.mesh))
        return x.reshape(-1, contents.step * contents.units, *self.unit)


def _unit_of(blocks: Sequence[tuple[int, int]], counts: Sequence[int]) -> tuple:
    """Returns the unit of all blocks: a block, some tiles, or some entries."""
    if len({*blocks}) == 1:
        return blocks[0]
    sizes = [*map(math.prod, blocks)]
    total = sum(map(math.prod, zip(sizes, counts, strict=True)))
    if not all(map(_is_tiled, blocks)) and total // math.gcd(*sizes) <= MOST_UNITS:
        return (math.gcd(*sizes),)
    # Blocks that no tile divides are flat, and padded to whole tiles.
    return (math.gcd(*(-(-size // math.prod(TILE)) for size in sizes)), *TILE)


def _is_tiled(block: tuple[int, int]) -> bool:
    """Whether tiles divide both sides of a block."""
    return not any(n % size for n, size in zip(block, TILE, strict=True))


def _here(numbers: np.ndarray, members: tuple[str, ...]) -> Any:
    """Returns this device's number, a Python number if all devices have the same."""
    if (numbers == numbers[0]).all():
        return int(numbers[0])
    return jnp.asarray(numbers)[jax.lax.axis_index(members)]

"""Parcels: what is sent to the owners of matrices, and what comes back.

An all-to-all sends as much from every device to every other. With an exchange for each
stack, a device that owns few matrices of one would be sent padding. Here all that an
owner gets of some stacks is one parcel, and parcels are as even as the work is:

    blocks -> units -> parcels, one for each owner -> all_to_all -> the owner's parcel,
    where every matrix gives way to what it becomes, and the same backwards
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._axes import gather_everywhere
from .._matrices.stacks import Stack
from .._newton_schulz.solver import Solver
from .owners import Cut


#: What a TPU stores side by side: blocks that it divides are moved without a copy.
TILE = (8, 128)

#: The most units of blocks that no tile divides, unless they are padded to whole tiles:
#: each takes a number in the program.
MOST_UNITS = 2**12

#: The most owners whose parcels of one stack are copied run by run: slices of known
#: bounds, where the compiler for TPU makes of a gather of large blocks loops that take
#: 24 of 300 Mcycles of Kimi K2's update. It takes a slice for each owner.
MOST_RUNS = 16


class OwnedStack(NamedTuple):
    """Matrices that a mesh cuts alike, and how many each device has.

    The parts of the stack are what one device holds: blocks.
    """

    name: str  # by which benchmarks know its loop
    stack: Stack
    cut: Cut
    counts: np.ndarray  # of each member

    @property
    def padding(self) -> float:
        """What an exchange of its own would send, over the least."""
        return int(self.counts.max()) * len(self.counts) / max(1, self.stack.count)


class Contents(NamedTuple):
    """Where a stack is in the parcels.

    - `block`: rows and columns that a device holds of a matrix.
    - `units`: of a block.
    - `step`: the matrices that are iterated at once.
    - `first`: the unit of each owner's parcel where they begin.
    - `trips`: how often each owner iterates `step` of them.
    """

    stack: OwnedStack
    block: tuple[int, int]
    units: int
    step: int
    first: np.ndarray
    trips: np.ndarray


class Parcels:
    """One exchange of stacks whose matrices the same devices share out.

    Arrays of a parcel are `(devices, units, *unit)`: its owner has as many units from
    each device that has blocks of them.
    """

    def __init__(
        self, solver: Solver, stacks: Sequence[OwnedStack], mesh: Mapping[Any, int]
    ):
        cut = stacks[0].cut
        self.solver, self.mesh = solver, mesh
        self.replicated, self.sharded = cut.replicated, cut.sharded
        self.repeated = cut.repeated
        self.dtype = solver.wire_dtype(stacks[0].stack.dtype)
        blocks = [x.stack.parts[0][1].view.matrix_shape for x in stacks]
        self.unit = _unit_of(blocks, [x.stack.count for x in stacks])
        # Parcel by parcel the units, of all that a device has of the stacks in order,
        # and -1 for padding.
        rows: list[list[int]] = [[] for _ in stacks[0].counts]
        ends, self.contents, start = [0] * len(rows), [], 0
        for stack, block in zip(stacks, blocks, strict=True):
            units = -(-math.prod(block) // math.prod(self.unit))
            counts = stack.counts
            most = max(1, int(counts.max()))
            size = solver.batch_size(stack.cut.shape, in_blocks=bool(cut.sharded))
            # Trips as even as they can be: what pads the last is iterated for nothing.
            step = math.ceil(most / math.ceil(most / size))
            trips = -(-counts // step)
            first = np.array([len(row) for row in rows], np.int32)
            self.contents.append(Contents(stack, block, units, step, first, trips))
            for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
                stop = start + int(count) * units
                row += range(start, stop)
                ends[i] = len(row) if count else ends[i]
                row += [-1] * (int(trips[i]) * step - int(count)) * units
                start = stop
        #: The units of a parcel as it is sent, and as its owner iterates it: the last
        #: matrices may be fewer than are iterated at once.
        self.sent, self.kept = max(1, *ends), max(1, *map(len, rows))
        index = np.full((len(rows), self.sent), -1, np.int32)
        for line, row in zip(index, rows, strict=True):
            line[: min(len(row), self.sent)] = row[: self.sent]
        self.is_full = len(stacks) == 1 and bool((index >= 0).all())
        #: Whether every owner has as many matrices of each stack.
        self.is_even = all((x.counts == x.counts[0]).all() for x in stacks)
        #: Where the only stack's units of each owner begin, and how many there are.
        self.runs: list[tuple[int, int]] = []
        if len(stacks) == 1 and not self.is_full and len(rows) <= MOST_RUNS:
            sizes = stacks[0].counts * self.contents[0].units
            stops = np.cumsum(sizes)
            self.runs = [*zip((stops - sizes).tolist(), sizes.tolist(), strict=True)]
        # An empty unit may be any.
        self.index = np.maximum(index, 0)
        filled = np.flatnonzero(index >= 0)
        self.back = np.empty(len(filled), np.int32)
        self.back[index.reshape(-1)[filled]] = filled

    def arrive(self, leaves: Sequence[Sequence[jax.Array]]) -> jax.Array:
        """The parcel of this device, from its blocks `(count, *block)`."""
        units = [self._divided(x) for blocks in leaves for x in blocks]
        x = jnp.concatenate([x.reshape(-1, *self.unit) for x in units])
        copies = math.prod(self.mesh[a] for a in self.replicated)
        # Copies hold the same blocks, and each sends its part of the parcels alone.
        index = self.index.reshape(copies, -1)
        mine = jax.lax.axis_index(self.replicated) if self.replicated else 0
        if not self.is_full and not self.runs:
            x = jnp.take(x, jnp.asarray(index)[mine], axis=0)
        else:
            if self.runs:
                # After the last run there is nothing to fill a parcel with.
                x = jnp.pad(x, [(0, self.sent), *[(0, 0)] * len(self.unit)])
                starts = (start for start, _ in self.runs)
                x = jnp.concatenate([x[i : i + self.sent] for i in starts])
            if self.replicated:
                x = x.reshape(copies, -1, *self.unit)
                x = jax.lax.dynamic_index_in_dim(x, mine, keepdims=False)
        x = self._exchanged(x.reshape(-1, self.sent, *self.unit))
        extra = self.kept - self.sent
        return jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * len(self.unit)])

    def iterate(self, parcel: jax.Array) -> jax.Array:
        """Every matrix of a parcel gives way to what it becomes."""
        members = self.replicated + self.sharded
        for of in self.contents:
            size = of.step * of.units
            first, trips = (_at(x, members) for x in (of.first, of.trips))

            def replace(i: Any, parcel: jax.Array, of=of, size=size, first=first):
                at = first + i * size
                x = jax.lax.dynamic_slice_in_dim(parcel, at, size, axis=1)
                # Without it what prepares a matrix would store it in float32.
                x = jax.lax.optimization_barrier(self._matrices(x, of))
                x = self.solver.orthogonalize(x).astype(parcel.dtype)
                x = self._blocks(x, of)
                return jax.lax.dynamic_update_slice_in_dim(parcel, x, at, axis=1)

            with jax.named_scope(of.stack.name):
                parcel = jax.lax.fori_loop(0, trips, replace, parcel)
        return parcel

    def depart(self, parcel: jax.Array) -> list[jax.Array]:
        """The inverse of `arrive`: of each stack `(count, *block)`."""
        x = self._exchanged(parcel[:, : self.sent])
        x = x.reshape(-1, *self.unit)
        if self.replicated:
            x = gather_everywhere(x, self.replicated, axis=0, tiled=True)
        if self.runs:
            parcels = x.reshape(-1, self.sent, *self.unit)
            sizes = [size for _, size in self.runs]
            x = jnp.concatenate(
                [each[:size] for each, size in zip(parcels, sizes, strict=True)]
            )
        found, start = [], 0
        for of in self.contents:
            stop = start + of.stack.stack.count * of.units
            is_whole = self.is_full or self.runs
            y = x if is_whole else jnp.take(x, self.back[start:stop], axis=0)
            found.append(self._united(y.reshape(-1, of.units, *self.unit), of.block))
            start = stop
        return found

    def _exchanged(self, x: jax.Array) -> jax.Array:
        """Sends the parcel of every device to it."""
        if not self.sharded:
            return x
        return jax.lax.all_to_all(x, self.sharded, 0, 0, tiled=True)

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
        return len(self.unit) > 1 and _tiles(block) is not None

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

    def _matrices(self, x: jax.Array, of: Contents) -> jax.Array:
        """`(devices, step * units, *unit)` to `(step, *matrix)`."""
        x = self._united(x.reshape(-1, of.units, *self.unit), of.block)
        shape, order = self._factors(of)
        ordered = [n for i, n in sorted(zip(order, shape, strict=True))]
        return x.reshape(ordered).transpose(order).reshape(-1, *of.stack.cut.shape)

    def _blocks(self, x: jax.Array, of: Contents) -> jax.Array:
        """The inverse of `_matrices`."""
        shape, order = self._factors(of)
        x = x.reshape(shape).transpose(np.argsort(order))
        x = self._divided(x.reshape(-1, *of.block))
        return x.reshape(-1, of.step * of.units, *self.unit)

    def _factors(self, of: Contents) -> tuple[list[int], list[int]]:
        """The axes of `(step, *matrix)` as factors, and the place of each in blocks.

        Side by side the devices along a factor and its block are it. In blocks devices
        come first, in the order of the mesh, and then the matrices.
        """
        n = len(self.sharded)
        shape, order = [of.step], [n]
        for i, (size, names) in enumerate(of.stack.cut.factors):
            peers = [self.mesh[name] for name in names]
            shape += [*peers, size // math.prod(peers)]
            order += [*map(self.sharded.index, names), n + 1 + i]
        return shape, order


def _unit_of(blocks: Sequence[tuple[int, int]], counts: Sequence[int]) -> tuple:
    """What all blocks are made of: a block, some tiles, or some entries."""
    if len({*blocks}) == 1:
        return blocks[0]
    sizes = [*map(math.prod, blocks)]
    total = sum(map(math.prod, zip(sizes, counts, strict=True)))
    is_tiled = all(_tiles(block) is not None for block in blocks)
    if not is_tiled and total // math.gcd(*sizes) <= MOST_UNITS:
        return (math.gcd(*sizes),)
    # What no tile divides is flat, and padded to whole tiles.
    return (math.gcd(*(-(-size // math.prod(TILE)) for size in sizes)), *TILE)


def _tiles(block: tuple[int, int]) -> tuple[int, int] | None:
    """The tiles along both sides, if they divide a block."""
    (rows, columns), (p, q) = block, TILE
    return None if rows % p or columns % q else (rows // p, columns // q)


def _at(numbers: np.ndarray, members: tuple[str, ...]) -> Any:
    """This device's number: one that is known if it is that of all."""
    if (numbers == numbers[0]).all():
        return int(numbers[0])
    return jnp.asarray(numbers)[jax.lax.axis_index(members)]

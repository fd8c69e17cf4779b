"""Which matrices on a mesh share a stack, how they travel and who iterates them."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._matrices.stacks import Part, Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .block_layout import AxisRoles, block_layout, BlockLayout, local_view
from .exchange import Exchange, Slots
from .ownership import assign_owners, Owners, Work
from .padded_exchange import PaddedExchange
from .ragged_exchange import RaggedExchange


#: How many more slots matrices may take in stacks of one layout than in one of all.
MOST_PADDING = 1.1


class Rounds(NamedTuple):
    """In each of them some batches of `size` matrices are iterated in turns."""

    number: int
    size: int


class SharedStack(NamedTuple):
    """Matrices of one shape, dtype and axis roles; the parts are a device's blocks."""

    stack: Stack
    exchange: Exchange

    def rounds(self, solver: Solver) -> Rounds:
        """How its slots are iterated in a loop, as far as all devices own them."""
        if not isinstance(self.exchange, RaggedExchange):
            return Rounds(0, 0)
        size = solver.batch_size(self.stack.shape)
        number = int(self.exchange.owners.counts.min()) // (size * solver.turns)
        return Rounds(number if number > 1 else 0, size)

    def rest(self, solver: Solver) -> list[Slots]:
        """The other slots, in the pieces in which they travel."""
        number, size = self.rounds(solver)
        pieces = functools.partial(solver.pieces, self.stack.shape)
        return self.exchange.pieces(pieces, number * size * solver.turns)


class Placed(NamedTuple):
    """A device's matrices of one leaf, and how the mesh cuts them."""

    dtype: str
    part: Part
    layout: BlockLayout

    @property
    def kind(self) -> tuple[str, tuple[int, int], AxisRoles]:
        """Matrices of one kind can share a stack, whatever their blocks are."""
        return self.dtype, self.layout.wide.shape, self.layout.roles


Group = list[Placed]


def plan_exchanges(
    solver: Solver,
    dtypes: Sequence[jnp.dtype],
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
    *,
    ragged: bool = False,
) -> list[SharedStack]:
    """`mesh` maps names of axes to sizes; `ragged` is whether its devices can send
    each other messages of unequal sizes.
    """
    leaves = zip(map(jnp.dtype, dtypes), views, specs, strict=True)
    placed = [
        Placed(dtype.name, Part(i, local_view(view, spec, mesh)), layout)
        for i, (dtype, view, spec) in enumerate(leaves)
        for layout in [block_layout(view, spec, mesh)]
    ]
    groups = [
        divided
        for group in _grouped(placed, lambda leaf: leaf.kind)
        for divided in _divide(solver, group, mesh, ragged)
    ]
    all_owners = assign_owners([_work(solver, group) for group in groups], mesh)
    return [
        SharedStack(_stack(group), _exchange(solver, group, owners, ragged, mesh))
        for group, owners in zip(groups, all_owners, strict=True)
    ]


def _divide(
    solver: Solver, group: Group, mesh: Mapping[str, int], ragged: bool
) -> Iterator[Group]:
    """On TPU stacks of one layout each, unless that would have more padding travel.

    Their blocks are put together in one way, and not in that of each matrix.
    """
    divided = _grouped(group, lambda leaf: leaf.layout)
    roles = group[0].layout.roles
    devices = math.prod(mesh[name] for name in (*roles.replicated, *roles.sharded))
    apart, together = (
        sum(math.ceil(_stack(each).count / devices) for each in groups)
        for groups in (divided, [group])
    )
    pads_little = _sends_unequal(solver, ragged, group, mesh) or (
        apart <= MOST_PADDING * together
    )
    if solver.platform == "tpu" and pads_little:
        # Tall matrices are iterated as they lie.
        yield from divided
    else:
        yield [leaf._replace(layout=leaf.layout.wide) for leaf in group]


def _stack(group: Group) -> Stack:
    parts = tuple(leaf.part for leaf in group)
    return Stack(group[0].layout.shape, group[0].dtype, parts)


def _work(solver: Solver, group: Group) -> Work:
    stack = _stack(group)
    cost = solver.cost(stack.shape, jnp.dtype(stack.dtype))
    return Work(stack.count, cost, group[0].layout.roles)


def _sends_unequal(
    solver: Solver, ragged: bool, group: Group, mesh: Mapping[str, int]
) -> bool:
    """Not where copies of blocks share the work: results go to all of them at once."""
    roles = group[0].layout.roles
    is_cut = any(mesh[name] > 1 for name in roles.sharded)
    is_able = solver.platform == "tpu" and ragged
    return is_able and is_cut and not roles.replicated


def _exchange(
    solver: Solver,
    group: Group,
    owners: Owners,
    ragged: bool,
    mesh: Mapping[str, int],
) -> Exchange:
    layouts = list(dict.fromkeys(leaf.layout for leaf in group))
    roles = layouts[0].roles
    if _sends_unequal(solver, ragged, group, mesh):
        (layout,) = layouts
        return RaggedExchange(owners, roles, layout)
    kinds = [
        np.full(leaf.part.view.count, layouts.index(leaf.layout), np.int32)
        for leaf in group
    ]
    return PaddedExchange(owners, roles, tuple(layouts), np.concatenate(kinds))


def _grouped(leaves: Iterable[Placed], key: Callable[[Placed], Any]) -> list[Group]:
    groups: dict[Any, Group] = {}
    for leaf in leaves:
        groups.setdefault(key(leaf), []).append(leaf)
    return list(groups.values())

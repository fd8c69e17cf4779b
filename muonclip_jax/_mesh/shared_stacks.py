"""Which matrices on a mesh share a stack, how they travel and who iterates them."""

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
from .exchange import Exchange
from .ownership import assign_owners, groups_of, Owners, Work
from .repeats import NO_REPEATS, Repeats, work_and_bytes


#: How many more slots matrices may take in stacks of one layout than in one of all.
MOST_PADDING = 1.1


class SharedStack(NamedTuple):
    """Matrices of one shape, dtype and role of each axis; the parts are a device's."""

    stack: Stack
    exchange: Exchange


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
Leaf = tuple[jnp.dtype, MatrixView, PartitionSpec]


def plan_exchanges(
    solver: Solver,
    dtypes: Sequence[jnp.dtype],
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
    repeats: Repeats = NO_REPEATS,
) -> list[SharedStack]:
    """The plan of least time, if there is a choice of what replicas repeat."""
    leaves = [*zip(map(jnp.dtype, dtypes), views, specs, strict=True)]
    plans = [_plan(solver, leaves, mesh, each) for each in repeats.alternatives]
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: _expense(solver, plan, mesh, repeats))


def _plan(
    solver: Solver, leaves: Sequence[Leaf], mesh: Mapping[str, int], repeats: Repeats
) -> list[SharedStack]:
    placed = [_place(solver, i, x, mesh, repeats) for i, x in enumerate(leaves)]
    groups = [
        divided
        for group in _grouped(placed, lambda leaf: leaf.kind)
        for divided in _divide(solver, group, mesh)
    ]
    all_owners = assign_owners([_work(solver, group) for group in groups], mesh)
    return [
        SharedStack(_stack(group), _exchange(group, owners))
        for group, owners in zip(groups, all_owners, strict=True)
    ]


def _place(solver: Solver, index: int, leaf: Leaf, mesh, repeats: Repeats) -> Placed:
    dtype, view, spec = leaf
    layout = block_layout(view, spec, mesh)
    axes = repeats.of_matrices(solver, layout.shape, dtype, layout.roles, mesh)
    part = Part(index, local_view(view, spec, mesh))
    return Placed(dtype.name, part, layout.repeated(axes))


def _expense(
    solver: Solver, plan: Sequence[SharedStack], mesh: Mapping[str, int], repeats
) -> float:
    """Operations of the busiest device, and what fits into the time of its bytes."""
    loads, received = np.zeros(math.prod(mesh.values())), 0.0
    for stack, exchange in plan:
        flops, _ = work_and_bytes(solver, stack.shape, jnp.dtype(stack.dtype))
        loads[groups_of(exchange.roles, mesh)] += flops * exchange.owners.counts
        received += repeats.received(solver, stack, exchange.roles, mesh)
    return loads.max() + repeats.below * received


def _divide(solver: Solver, group: Group, mesh: Mapping[str, int]) -> Iterator[Group]:
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
    if solver.platform == "tpu" and apart <= MOST_PADDING * together:
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


def _exchange(group: Group, owners: Owners) -> Exchange:
    layouts = list(dict.fromkeys(leaf.layout for leaf in group))
    kinds = [
        np.full(leaf.part.view.count, layouts.index(leaf.layout), np.int32)
        for leaf in group
    ]
    return Exchange(owners, tuple(layouts), np.concatenate(kinds))


def _grouped(leaves: Iterable[Placed], key: Callable[[Placed], Any]) -> list[Group]:
    groups: dict[Any, Group] = {}
    for leaf in leaves:
        groups.setdefault(key(leaf), []).append(leaf)
    return list(groups.values())

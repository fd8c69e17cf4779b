"""Which matrices on a mesh share a stack, how they travel and who iterates them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._matrices.stacks import Part, Stack
from .._matrices.view import MatrixView
from .._newton_schulz.solver import Solver
from .block_layout import block_layout, BlockLayout, local_view
from .exchange import Exchange
from .ownership import assign_owners, Owners, Work


#: How many more slots matrices may take in stacks of one layout than in one of all.
MOST_PADDING = 1.1


class SharedStack(NamedTuple):
    """Matrices of one shape, dtype and role of each axis; the parts are a device's."""

    stack: Stack
    exchange: Exchange


class Group(NamedTuple):
    """Parts of a stack, and the layout of each."""

    dtype: str
    parts: tuple[Part, ...]
    layouts: tuple[BlockLayout, ...]

    @property
    def stack(self) -> Stack:
        return Stack(self.layouts[0].shape, self.dtype, self.parts)

    def work(self, solver: Solver) -> Work:
        stack, roles = self.stack, self.layouts[0].roles
        return Work(stack.count, solver.cost(stack.shape, jnp.dtype(self.dtype)), roles)

    def exchange(self, owners: Owners) -> Exchange:
        layouts = list(dict.fromkeys(self.layouts))
        counts = [part.view.count for part in self.parts]
        kinds = np.repeat([layouts.index(x) for x in self.layouts], counts)
        return Exchange(owners, tuple(layouts), kinds.astype(np.int32))


def plan_exchanges(
    solver: Solver,
    dtypes: Sequence[jnp.dtype],
    views: Sequence[MatrixView],
    specs: Sequence[PartitionSpec],
    mesh: Mapping[str, int],
) -> list[SharedStack]:
    viewed = [*zip(views, specs, strict=True)]
    parts = [Part(i, local_view(*each, mesh)) for i, each in enumerate(viewed)]
    layouts = [block_layout(*each, mesh) for each in viewed]
    names = [jnp.dtype(dtype).name for dtype in dtypes]
    keys = [(n, x.shape, x.roles) for n, x in zip(names, layouts, strict=True)]
    groups = [
        group
        for together in _group(keys, names, parts, layouts)
        for group in _divide(solver, together, mesh)
    ]
    all_owners = assign_owners([group.work(solver) for group in groups], mesh)
    return [
        SharedStack(group.stack, group.exchange(owners))
        for group, owners in zip(groups, all_owners, strict=True)
    ]


def _divide(solver: Solver, group: Group, mesh: Mapping[str, int]) -> Iterator[Group]:
    """On TPU stacks of one layout each, unless that would have more padding travel.

    Their blocks are put together in one way, and not in that of each matrix.
    """
    if solver.platform != "tpu":
        yield group
        return
    roles = group.layouts[0].roles
    devices = math.prod(mesh[name] for name in (*roles.replicated, *roles.sharded))
    divided = _group(
        group.layouts, [group.dtype] * len(group.parts), group.parts, group.layouts
    )
    slots = [math.ceil(each.stack.count / devices) for each in divided]
    if sum(slots) > MOST_PADDING * math.ceil(group.stack.count / devices):
        yield group
        return
    for each in divided:
        # Tall matrices are iterated as they lie.
        layouts = [dataclasses.replace(x, turned=False) for x in each.layouts]
        yield each._replace(layouts=tuple(layouts))


def _group(keys, dtypes, parts, layouts) -> list[Group]:
    groups: dict = {}
    for key, *each in zip(keys, dtypes, parts, layouts, strict=True):
        groups.setdefault(key, []).append(each)
    return [
        Group(group[0][0], *(tuple(x) for x in [*zip(*group, strict=True)][1:]))
        for group in groups.values()
    ]

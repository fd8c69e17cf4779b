"""How often each device of a mesh runs the loops of our update that depend on it.

Matrices are shared out whole, and not every device gets as many: a loop over its share
then runs as often as a table says, which the text of a compiled program leaves out.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from internals import (
    groups_of,
    Matrices,
    matrix_view,
    Parcels,
    plan_exchanges,
    solver,
)
from models import Model
from optax.contrib import MuonDimensionNumbers


def loops_of_devices(model: Model, platform: str) -> list[dict[str, int]]:
    """Number of trips by name scope, for each kind of device that there is.

    They are the loops of stacks of which devices own different numbers.
    """
    trips = {}
    for parcels in _plan(model, platform):
        for of in parcels.contents:
            if (of.trips != of.trips[0]).any():
                each = np.empty(math.prod(model.mesh.values()), int)
                each[groups_of(of.stack.cut, model.mesh)] = of.trips
                trips[of.stack.name] = each
    kinds = np.unique(np.stack([*trips.values()]), axis=1).T if trips else [[]]
    return [dict(zip(trips, map(int, kind), strict=True)) for kind in kinds]


def even_flops(model: Model, platform: str) -> float:
    """Floating-point operations of each device if all did as many."""
    flops = 0.0
    for parcels in _plan(model, platform):
        for _, stack, cut, counts in (of.stack for of in parcels.contents):
            one = solver(platform).cost(stack.shape, stack.dtype)
            groups = len(groups_of(cut, model.mesh))
            flops += 2.0 * one * groups * int(counts.sum())
    return flops / math.prod(model.mesh.values())


def _plan(model: Model, platform: str) -> list[Parcels]:
    return plan_exchanges(solver(platform), _leaves(model), model.mesh)


def _leaves(model: Model) -> list[Matrices]:
    dtype, axes = model.mu_dtype or "float32", MuonDimensionNumbers(-2, -1)
    names = sorted(model.shapes.keys() - set(model.adam))
    leaves = [jax.ShapeDtypeStruct(model.shapes[x], jnp.dtype(dtype)) for x in names]
    views = (matrix_view(leaf.shape, axes) for leaf in leaves)
    specs = (model.specs[name] for name in names)
    return [*map(Matrices, leaves, views, specs)]

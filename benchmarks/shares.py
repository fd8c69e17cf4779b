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
    plan_exchanges,
    SharedStack,
    solver,
)
from models import Model
from optax.contrib import MuonDimensionNumbers


def loops_of_devices(model: Model, platform: str) -> list[dict[str, int]]:
    """Number of trips by name scope, for each kind of device that there is.

    They are the loops of stacks of which devices own different numbers.
    """
    trips = {}
    for i, (stack, cut, share) in enumerate(_plan(model, platform)):
        if not share.is_full:
            counts = np.empty(math.prod(model.mesh.values()), int)
            counts[groups_of(cut, model.mesh)] = share.counts
            most = solver(platform).batch_size(stack.shape)
            step = math.ceil(share.slots / math.ceil(share.slots / most))
            trips[f"stack{i}"] = -(-counts // step)
    kinds = np.unique(np.stack([*trips.values()]), axis=1).T if trips else [[]]
    return [dict(zip(trips, map(int, kind), strict=True)) for kind in kinds]


def even_flops(model: Model, platform: str) -> float:
    """Floating-point operations of each device if all did as many."""
    flops = 0.0
    for stack, cut, share in _plan(model, platform):
        one = solver(platform).cost(stack.shape, stack.dtype)
        groups = len(groups_of(cut, model.mesh))
        flops += 2.0 * one * groups * int(share.counts.sum())
    return flops / math.prod(model.mesh.values())


def _plan(model: Model, platform: str) -> list[SharedStack]:
    return plan_exchanges(solver(platform), _leaves(model), model.mesh)


def _leaves(model: Model) -> list[Matrices]:
    dtype, axes = model.mu_dtype or "float32", MuonDimensionNumbers(-2, -1)
    names = sorted(model.shapes.keys() - set(model.adam))
    leaves = [jax.ShapeDtypeStruct(model.shapes[x], jnp.dtype(dtype)) for x in names]
    views = (matrix_view(leaf.shape, axes) for leaf in leaves)
    specs = (model.specs[name] for name in names)
    return [*map(Matrices, leaves, views, specs)]

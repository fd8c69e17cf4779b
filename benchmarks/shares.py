"""How often each device of a mesh runs the loops of our update that depend on it.

Matrices are shared out whole, and not every device gets as many: a loop over its share
then runs as often as a table says, which the text of a compiled program leaves out.
"""

import math

import jax.numpy as jnp
import numpy as np
from models import Model
from optax.contrib import MuonDimensionNumbers

from muonclip_jax._matrices.view import matrix_view
from muonclip_jax._mesh.on_mesh import plan_exchanges, SharedStack
from muonclip_jax._mesh.ownership import groups_of
from muonclip_jax._newton_schulz.batches import batch_size
from muonclip_jax._newton_schulz.platforms import BATCH_ENTRIES, Platform
from muonclip_jax._newton_schulz.solver import make_solver


SOLVER = make_solver("keller", 5, "auto", None, "frobenius", "xla")


def loops_of_devices(model: Model, platform: Platform) -> list[dict[str, int]]:
    """Number of trips by name scope, for each kind of device that there is."""
    plan = _plan(model, platform)
    trips = np.empty((len(plan), math.prod(model.mesh.values())), int)
    for i, (stack, exchange) in enumerate(plan):
        counts, slots = exchange.owners.counts, exchange.owners.slots.shape[-1]
        size = batch_size((slots, *stack.shape), BATCH_ENTRIES[platform])
        trips[i, groups_of(exchange.roles, model.mesh)] = -(-counts // size)
    return [
        {f"stack{i}": int(n) for i, n in enumerate(column)}
        for column in np.unique(trips, axis=1).T
    ]


def even_flops(model: Model, platform: Platform) -> float:
    """Floating-point operations of each device if all did as many."""
    flops = 0.0
    for stack, exchange in _plan(model, platform):
        one = SOLVER.on(platform).cost(stack.shape, jnp.dtype(stack.dtype))
        flops += 2.0 * one * int(exchange.owners.counts.sum())
    return flops / math.prod(model.mesh.values())


def _plan(model: Model, platform: Platform) -> list[SharedStack]:
    names = sorted(model.shapes.keys() - set(model.adam))
    axes = MuonDimensionNumbers(-2, -1)
    return plan_exchanges(
        SOLVER.on(platform),
        [jnp.dtype(model.mu_dtype or "float32")] * len(names),
        [matrix_view(model.shapes[name], axes) for name in names],
        [model.specs[name] for name in names],
        model.mesh,
    )

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
from muonclip_jax._mesh.exchange import Exchange
from muonclip_jax._mesh.on_mesh import plan_exchanges, plan_stacks, Stack
from muonclip_jax._mesh.ownership import groups_of
from muonclip_jax._newton_schulz.batches import size_of_chunks
from muonclip_jax._newton_schulz.options import resolve_options
from muonclip_jax._newton_schulz.platforms import CHUNK_SIZE, cost, Platform


OPTIONS = resolve_options("keller", 5, "auto", None, "frobenius", "xla")


Plan = list[tuple[Stack, Exchange]]


def loops_of_devices(model: Model, platform: Platform) -> list[dict[str, int]]:
    """Number of trips by name scope, for each kind of device that there is."""
    plan = _plan(model, platform)
    trips = np.empty((len(plan), math.prod(model.mesh.values())), int)
    for i, (stack, exchange) in enumerate(plan):
        counts, slots = exchange.owners.counts, exchange.owners.slots.shape[-1]
        size = size_of_chunks((slots, *stack.shape), CHUNK_SIZE[platform])
        trips[i, groups_of(stack.route, model.mesh)] = -(-counts // size)
    return [
        {f"stack{i}": int(n) for i, n in enumerate(column)}
        for column in np.unique(trips, axis=1).T
    ]


def even_flops(model: Model, platform: Platform) -> float:
    """Floating-point operations of each device if all did as many."""
    flops = 0.0
    for stack, exchange in _plan(model, platform):
        one = cost(stack.shape, jnp.dtype(stack.dtype), OPTIONS, platform)
        flops += 2.0 * one * int(exchange.owners.counts.sum())
    return flops / math.prod(model.mesh.values())


def _plan(model: Model, platform: Platform) -> Plan:
    names = sorted(model.shapes.keys() - set(model.adam))
    axes = MuonDimensionNumbers(-2, -1)
    stacks = plan_stacks(
        [jnp.dtype(model.mu_dtype or "float32")] * len(names),
        [matrix_view(model.shapes[name], axes) for name in names],
        [model.specs[name] for name in names],
        model.mesh,
    )
    exchanges = plan_exchanges(stacks, model.mesh, OPTIONS, platform)
    return list(zip(stacks, exchanges, strict=True))

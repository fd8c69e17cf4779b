"""How often each device of a mesh runs the loops of our update that depend on it.

Matrices are shared out whole, and not every device gets as many: a loop over its share
then runs as often as a table says, which the text of a compiled program leaves out.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from models import Model
from optax.contrib import MuonDimensionNumbers

from muonclip_jax._matrices.view import matrix_view, MatrixView
from muonclip_jax._mesh.by_constraint import divide_stacks
from muonclip_jax._mesh.on_mesh import plan_exchanges, SharedStack
from muonclip_jax._mesh.ownership import groups_of
from muonclip_jax._newton_schulz.batches import batch_size
from muonclip_jax._newton_schulz.platforms import BATCH_ENTRIES, Platform
from muonclip_jax._newton_schulz.solver import make_solver


SOLVER = make_solver("keller", 5, "auto", None, "frobenius", "xla")


def loops_of_devices(
    model: Model, platform: Platform, *, told: bool = True
) -> list[dict[str, int]]:
    """Number of trips by name scope, for each kind of device that there is.

    `told` is whether the update knows how the leaves lie.
    """
    trips = (_trips if told else _trips_untold)(model, platform)
    kinds = np.unique(np.stack([*trips.values()]), axis=1).T if trips else [[]]
    return [
        {f"stack{i}": int(n) for i, n in zip(trips, kind, strict=True)}
        for kind in kinds
    ]


def even_flops(model: Model, platform: Platform) -> float:
    """Floating-point operations of each device if all did as many."""
    flops = 0.0
    for stack, exchange in _plan(model, platform):
        one = SOLVER.on(platform).cost(stack.shape, jnp.dtype(stack.dtype))
        flops += 2.0 * one * int(exchange.owners.counts.sum())
    return flops / math.prod(model.mesh.values())


def _trips(model: Model, platform: Platform) -> dict[int, np.ndarray]:
    """Of the loop of each stack of which devices own different numbers, on each."""
    trips = {}
    for i, (stack, exchange) in enumerate(_plan(model, platform)):
        if exchange.is_even:
            continue
        counts, slots = exchange.owners.counts, exchange.owners.most
        size = batch_size((slots, *stack.shape), BATCH_ENTRIES[platform])
        trips[i] = np.empty(math.prod(model.mesh.values()), int)
        trips[i][groups_of(exchange.roles, model.mesh)] = -(-counts // size)
    return trips


def _trips_untold(model: Model, platform: Platform) -> dict[int, np.ndarray]:
    leaves, views = _leaves(model)
    plan = divide_stacks(SOLVER.on(platform), leaves, views, model.mesh)
    sizes = [
        batch_size((share.slots, *stack.shape), BATCH_ENTRIES[platform])
        for stack, share in plan
    ]
    return {
        i: -(-share.counts // size)
        for i, ((_, share), size) in enumerate(zip(plan, sizes, strict=True))
    }


def _plan(model: Model, platform: Platform) -> list[SharedStack]:
    leaves, views = _leaves(model)
    return plan_exchanges(
        SOLVER.on(platform),
        [leaf.dtype for leaf in leaves],
        views,
        [model.specs[name] for name in _names(model)],
        model.mesh,
    )


def _leaves(model: Model) -> tuple[list[jax.ShapeDtypeStruct], list[MatrixView]]:
    dtype, axes = model.mu_dtype or "float32", MuonDimensionNumbers(-2, -1)
    shapes = [model.shapes[name] for name in _names(model)]
    leaves = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    return leaves, [matrix_view(shape, axes) for shape in shapes]


def _names(model: Model) -> list[str]:
    return sorted(model.shapes.keys() - set(model.adam))

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
from muonclip_jax._mesh.by_constraint import divide_stacks, stacks_of
from muonclip_jax._mesh.ownership import groups_of
from muonclip_jax._mesh.shared_stacks import plan_exchanges, SharedStack
from muonclip_jax._newton_schulz.batches import batch_size, size_in_turns
from muonclip_jax._newton_schulz.make_solver import make_solver
from muonclip_jax._newton_schulz.platforms import BATCH_ENTRIES, Platform, TURNS


SOLVER = make_solver("keller", 5, "auto", None, "frobenius", "xla")


def loops_of_devices(
    model: Model, platform: Platform, ragged: bool, *, told: bool = True
) -> list[dict[str, int]]:
    """Number of trips by name scope, for each kind of device that there is.

    `told` is whether the update knows how the leaves are sharded, `ragged` whether
    devices can send messages of unequal sizes.
    """
    trips = _trips(model, platform, ragged) if told else _trips_untold(model, platform)
    kinds = np.unique(np.stack([*trips.values()]), axis=1).T if trips else [[]]
    return [dict(zip(trips, map(int, kind), strict=True)) for kind in kinds]


def even_flops(model: Model, platform: Platform, ragged: bool) -> float:
    """Floating-point operations of each device if all did as many."""
    flops = 0.0
    for stack, exchange in _plan(model, platform, ragged):
        one = SOLVER.on(platform).cost(stack.shape, jnp.dtype(stack.dtype))
        flops += 2.0 * one * int(exchange.owners.counts.sum())
    return flops / math.prod(model.mesh.values())


def _trips(model: Model, platform: Platform, ragged: bool) -> dict[str, np.ndarray]:
    """Of the loops of each stack of which devices own different numbers, on each."""
    trips = {}
    for i, shared in enumerate(_plan(model, platform, ragged)):
        (stack, exchange), rest = shared, shared.rest(SOLVER.on(platform))
        if exchange.is_even or not rest:
            continue
        counts = np.empty(math.prod(model.mesh.values()), int)
        counts[groups_of(exchange.roles, model.mesh)] = exchange.owners.counts
        (slots,) = rest
        counts -= slots.start
        shape = slots.length, *stack.shape
        trips |= _loops(f"stack{i}", shape, counts, platform)
    return trips


def _trips_untold(model: Model, platform: Platform) -> dict[str, np.ndarray]:
    leaves, views = _leaves(model)
    devices = math.prod(model.mesh.values())
    stacks = stacks_of(leaves, views, devices)
    plan = divide_stacks(SOLVER.on(platform), stacks, devices)
    trips = {}
    for i, (stack, share) in enumerate(plan):
        shape = share.slots, *stack.shape
        trips |= _loops(f"stack{i}", shape, share.counts, platform)
    return trips


def _loops(
    scope: str, shape: tuple[int, ...], counts: np.ndarray, platform: Platform
) -> dict[str, np.ndarray]:
    """Trips by scope of the loops over so many matrices of a stack."""
    limits = BATCH_ENTRIES[platform], TURNS[platform]
    size, together = batch_size(shape, limits[0]), size_in_turns(shape, *limits)
    if together == size:
        return {scope: -(-counts // size)}
    rest = -(-(counts % together) // size)
    return {f"{scope}/in_turns": counts // together, scope: rest}


def _plan(model: Model, platform: Platform, ragged: bool) -> list[SharedStack]:
    leaves, views = _leaves(model)
    return plan_exchanges(
        SOLVER.on(platform),
        [leaf.dtype for leaf in leaves],
        views,
        [model.specs[name] for name in _names(model)],
        model.mesh,
        ragged=ragged,
    )


def _leaves(model: Model) -> tuple[list[jax.ShapeDtypeStruct], list[MatrixView]]:
    dtype, axes = model.mu_dtype or "float32", MuonDimensionNumbers(-2, -1)
    shapes = [model.shapes[name] for name in _names(model)]
    leaves = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    return leaves, [matrix_view(shape, axes) for shape in shapes]


def _names(model: Model) -> list[str]:
    return sorted(model.shapes.keys() - set(model.adam))

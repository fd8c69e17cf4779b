"""How often each device of a mesh runs the loops of our update that depend on it.

Matrices are shared out whole, and not every device gets as many: a loop over its share
then runs as often as a table says, which the text of a compiled program leaves out.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from internals import (
    Exchange,
    groups_of,
    matrix_view,
    MatrixLeaf,
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
    for exchange in _plan(model, platform):
        for owned, of_owners in zip(exchange.stacks, exchange.trips, strict=True):
            if (of_owners != of_owners[0]).any():
                each = np.empty(math.prod(model.mesh.values()), int)
                each[groups_of(owned.cut, model.mesh)] = of_owners
                trips[owned.name] = each
    kinds = np.unique(np.stack([*trips.values()]), axis=1).T if trips else [[]]
    return [dict(zip(trips, map(int, kind), strict=True)) for kind in kinds]


def even_flops(model: Model, platform: str) -> float:
    """Floating-point operations of each device if all did as many."""
    flops = 0.0
    for exchange in _plan(model, platform):
        for _, stack, cut, counts in exchange.stacks:
            one = solver(platform).cost(stack.shape, stack.dtype)
            groups = len(groups_of(cut, model.mesh))
            flops += 2.0 * one * groups * int(counts.sum())
    return flops / math.prod(model.mesh.values())


class Sent(NamedTuple):
    """The bytes that a device sends in an update, as planned, and has to send.

    Bytes are counted as `hlo_costs` does: the larger of what goes into a collective and
    what comes out of it.
    """

    exchanges: int  # there, and as many back
    bytes: int
    least: float


def sent(model: Model, platform: str, slow_axes: tuple[str, ...] = ()) -> Sent:
    """Of our update.

    The least is what every matrix needs that goes whole to one device, and back. Every
    entry that a device holds goes to the owner and comes back. Of copies each sends and
    gets its part of these, and from the others what they get.
    """
    bytes_sent, least, exchanges = 0, 0.0, 0
    for exchange in _plan(model, platform, slow_axes):
        copies, peers = (
            math.prod(model.mesh[axis] for axis in axes)
            for axes in (exchange.replicated, exchange.sharded)
        )
        parcel = exchange.entries * exchange.dtype.itemsize
        held = exchange.dtype.itemsize * sum(
            owned.stack.count * math.prod(owned.block) for owned in exchange.stacks
        )
        if exchange.sharded:
            bytes_sent += 2 * parcel * peers
            least += 2 * held / copies
        if exchange.replicated:
            bytes_sent += parcel * peers * copies
            least += held
        exchanges += bool(exchange.sharded or exchange.replicated)
    return Sent(exchanges, bytes_sent, least)


def _plan(
    model: Model, platform: str, slow_axes: tuple[str, ...] = ()
) -> list[Exchange]:
    return plan_exchanges(solver(platform), _leaves(model), model.mesh, slow_axes)


def _leaves(model: Model) -> list[MatrixLeaf]:
    dtype, axes = model.mu_dtype or "float32", MuonDimensionNumbers(-2, -1)
    names = sorted(model.shapes.keys() - set(model.adam))
    leaves = [jax.ShapeDtypeStruct(model.shapes[x], jnp.dtype(dtype)) for x in names]
    views = (matrix_view(leaf.shape, axes) for leaf in leaves)
    specs = (model.specs[name] for name in names)
    return [*map(MatrixLeaf, leaves, views, specs)]

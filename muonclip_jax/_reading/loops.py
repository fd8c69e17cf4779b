"""The primitives that run a jaxpr, but not once, and what devices exchange."""

import dataclasses
from typing import Any

from . import jaxprs
from .jaxprs import Axes, shape_of
from .pieces import Shape
from .values import Kind, Value
from .walk import rule, Walk


@rule("scan")
def scan(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Each trip has a part of what is stacked: of parameters, a layer's."""
    body, consts, carry = loop = jaxprs.scanned(eqn)
    trips, given, slices = walk.dim(walk.at), list(values), []
    for i, atom in enumerate(body.jaxpr.invars):
        shape, is_number = shape_of(atom), shape_of(atom) == ()
        if i >= consts + carry:
            value = values[i].moved([trips, *range(len(shape))], shape)
            # `scan(f, x, arange(n))` counts as `fori_loop` does, from zero.
            counts = is_number and values[i].is_counter
            slices.append(dataclasses.replace(value, trip=trips if counts else None))
        elif (
            i >= consts
            and (is_number and values[i].number == 0)
            and jaxprs.counts_trips(loop, i - consts)
        ):
            given[i] = Value(trip=trips)
    # Parameters that the loop closes over are shared by all trips, and so no stack.
    handed, stacked = walk.repeat(
        body, trips, given[:consts], given[consts : consts + carry], slices
    )
    for value, atom in zip(stacked, eqn.outvars[carry:], strict=True):
        shape = shape_of(atom)
        handed.append(value.moved(range(1, len(shape)), shape, {trips: 0}))
    return handed


@rule("while")
def while_(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    condition, first, (body, consts, _) = jaxprs.repeated(eqn)
    given = values[first : first + consts], values[first + consts :]
    handed, _ = walk.repeat(body, walk.dim(walk.at), *given)
    # The condition may use parameters, too, such as those of a halting unit.
    walk.run(jaxprs.inner(condition), [*values[:first], *handed], branch=1)
    return handed


@rule("cond")
def cond(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    index, *args = values
    outs = [walk.run(branch, args, i) for i, branch in enumerate(jaxprs.branches(eqn))]
    joined = [walk.either(out) for out in zip(*outs, strict=True)]
    return [
        dataclasses.replace(v, past=v.past | index.past)
        if v.kind == Kind.ACTIVATION
        else v
        for v in joined
    ]


@rule("psum psum_invariant psum2 pmax pmin all_to_all psum_scatter reduce_scatter")
def collective(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """What devices exchange; where it is afterwards is followed for sums alone."""
    names, outs = {*jaxprs.axes_of(eqn)}, []
    over = {dim: None for dim, axes in walk.devices.items() if names & {*axes.names}}
    for value, x, y in zip(values, eqn.invars, eqn.outvars, strict=True):
        old, new = shape_of(x), shape_of(y)
        to = range(len(old)) if "sum" in eqn.primitive.name and old == new else None
        outs.append(value.moved(to or [None] * len(old), new, over))
    return outs


@rule("all_gather all_gather_invariant")
def all_gather(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    axes = Axes(jaxprs.axes_of(eqn), eqn.params["axis_size"])
    dim, local = eqn.params["all_gather_dimension"], shape_of(eqn.invars[0])
    value, shape = _blocks_apart(walk, values[0], local, dim, axes)
    if not eqn.params["tiled"]:
        return value
    return value.reshaped(shape, shape_of(eqn.outvars[0]))


@rule("shard_map")
def shard_map(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Every device has its block, as every trip of a loop has its part.

    A dimension that mesh axes cut into m blocks of n is reshaped to (m, n), the first
    of which is the device's; afterwards, blocks are put together again.
    """
    body = jaxprs.called(eqn)
    assert body is not None
    inside = []
    for i, (value, atom) in enumerate(zip(values, eqn.invars, strict=True)):
        shape = shape_of(atom)
        for dim, axes in jaxprs.mesh_cuts(eqn, "in", i):
            local = (*shape[:dim], shape[dim] // axes.size, *shape[dim + 1 :])
            apart = (*local[:dim], axes.size, *local[dim:])
            to = [j - (j > dim) for j in range(len(apart))]
            to[dim] = walk.dim(axes)
            value, shape = value.reshaped(shape, apart).moved(to, local), local
        inside.append(value)
    outs = walk.run(body, inside)
    for i, atom in enumerate(body.jaxpr.outvars):
        value, shape = outs[i], shape_of(atom)
        for dim, axes in jaxprs.mesh_cuts(eqn, "out", i):
            value, apart = _blocks_apart(walk, value, shape, dim, axes)
            shape = (*shape[:dim], axes.size * shape[dim], *shape[dim + 1 :])
            value = value.reshaped(apart, shape)
        # Along axes that `out_specs` does not name all devices have the same.
        outs[i] = value.moved(range(len(shape)), shape, dict.fromkeys(walk.devices))
    return outs


def _blocks_apart(
    walk: Walk, value: Value, local: Shape, dim: int, axes: Axes
) -> tuple[Value, Shape]:
    """The blocks of all devices along a dimension before one of theirs."""
    apart = (*local[:dim], axes.size, *local[dim:])
    to = [j + (j >= dim) for j in range(len(local))]
    return value.moved(to, apart, {walk.dim(axes): dim}), apart

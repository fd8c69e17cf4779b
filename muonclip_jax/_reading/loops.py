"""Loops, branches and what devices do: primitives that run a jaxpr, but not once."""

import dataclasses
from typing import Any

from . import jaxprs, pieces
from .jaxprs import shape_of
from .pieces import Shape
from .values import Kind, mixed, nonlinear, Value
from .walk import rule, Walk


@rule("scan")
def scan(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Each trip takes a part of what is stacked: of parameters, a layer's."""
    body, consts, carry, _ = jaxprs.scanned(eqn)
    loop, taken = walk.loop(), []
    for value, atom in zip(
        values[consts + carry :], body.jaxpr.invars[consts + carry :], strict=True
    ):
        shape = shape_of(atom)
        taken.append(value.moved([loop, *range(len(shape))], shape))
    given = values[:consts], values[consts : consts + carry]
    handed, stacked = walk.repeat(body, loop, *given, taken)
    for value, atom in zip(stacked, eqn.outvars[carry:], strict=True):
        shape = shape_of(atom)
        handed.append(value.moved(range(1, len(shape)), shape, {loop: 0}))
    return handed


@rule("while")
def while_(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    condition, (body, consts, carry, _) = jaxprs.repeated(eqn)
    first = len(values) - consts - carry
    given = values[first : first + consts], values[first + consts :]
    handed, _ = walk.repeat(body, walk.loop(), *given)
    walk.run(condition, [*values[:first], *handed], branch=1)
    return handed


@rule("cond")
def cond(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    index, *args = values
    outs = [walk.run(branch, args, i) for i, branch in enumerate(jaxprs.branches(eqn))]
    joined = [walk.either(out, eqn) for out in zip(*outs, strict=True)]
    return [
        dataclasses.replace(v, past=v.past | index.past) if v.kind == 2 else v
        for v in joined
    ]


@rule("psum psum_invariant psum2 pmax pmin all_to_all psum_scatter reduce_scatter")
def collective(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """What devices exchange; where it lies afterwards is followed for sums alone."""
    names, outs = set(jaxprs.axes_of(eqn)), []
    over = {dim: None for dim, axes in walk.devices.items() if names & {*axes.names}}
    for value, x, y in zip(values, eqn.invars, eqn.outvars, strict=True):
        old, new = shape_of(x), shape_of(y)
        to = range(len(old)) if "sum" in eqn.primitive.name and old == new else None
        outs.append(value.moved(to or [None] * len(old), new, over))
    return outs


@rule("all_gather all_gather_invariant")
def all_gather(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    axes = jaxprs.Axes(jaxprs.axes_of(eqn), eqn.params["axis_size"])
    dim, local = eqn.params["all_gather_dimension"], shape_of(eqn.invars[0])
    value, shape = _blocks_apart(walk, values[0], local, dim, axes)
    if not eqn.params["tiled"]:
        return value
    new = shape_of(eqn.outvars[0])
    return value.mapped(lambda p: pieces.reshaped(p, shape, new))


@rule("shard_map")
def shard_map(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """Every device has its block, as every trip of a loop has its part.

    A dimension that mesh axes cut into m blocks of n is reshaped to (m, n), the first
    of which is the device's; behind, blocks are put together again.
    """
    body = jaxprs.called(eqn)
    assert body is not None
    inside = []
    for i, (value, atom) in enumerate(zip(values, eqn.invars, strict=True)):
        shape = shape_of(atom)
        for dim, axes in jaxprs.mesh_cuts(eqn, "in", i):
            local = (*shape[:dim], shape[dim] // axes.size, *shape[dim + 1 :])
            apart = (*local[:dim], axes.size, *local[dim:])
            value = value.mapped(lambda p, s=shape, a=apart: pieces.reshaped(p, s, a))
            to = [j - (j > dim) for j in range(len(apart))]
            to[dim] = walk.device(axes)
            value, shape = value.moved(to, local), local
        inside.append(value)
    outs = walk.run(body, inside)
    for i, atom in enumerate(body.jaxpr.outvars):
        value, shape = outs[i], shape_of(atom)
        for dim, axes in jaxprs.mesh_cuts(eqn, "out", i):
            value, apart = _blocks_apart(walk, value, shape, dim, axes)
            shape = (*shape[:dim], axes.size * shape[dim], *shape[dim + 1 :])
            value = value.mapped(lambda p, a=apart, s=shape: pieces.reshaped(p, a, s))
        # Along other axes all devices have the same.
        outs[i] = value.moved(range(len(shape)), shape, dict.fromkeys(walk.devices))
    return outs


def _blocks_apart(
    walk: Walk, value: Value, local: Shape, dim: int, axes: jaxprs.Axes
) -> tuple[Value, Shape]:
    """The blocks of all devices along a dimension before one of theirs."""
    apart = (*local[:dim], axes.size, *local[dim:])
    to = [j + (j >= dim) for j in range(len(local))]
    return value.moved(to, apart, {walk.device(axes): dim}), apart


@rule("reduce_window_max reduce_window_min select_and_gather_add")
def pooled(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    if values[0].kind == Kind.PARAMETER:
        return walk.unknown(eqn, values)
    return mixed(values, nonlinear(values))

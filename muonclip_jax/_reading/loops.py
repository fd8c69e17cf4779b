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
    body, consts, carry, length = jaxprs.scanned(eqn)
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


@rule("all_gather all_gather_invariant all_to_all psum_scatter reduce_scatter")
def collective(walk: Walk, eqn: Any, values: list[Value]) -> list[Value]:
    """What devices exchange: where it lies afterwards is not followed."""
    return [
        value.moved([None] * len(shape_of(x)), shape_of(y))
        for value, x, y in zip(values, eqn.invars, eqn.outvars, strict=True)
    ]


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
        for cut in jaxprs.mesh_cuts(eqn, "in", i):
            value, shape = _block_of(walk, value, shape, cut)
        inside.append(value)
    outs = walk.run(body, inside)
    for i, atom in enumerate(body.jaxpr.outvars):
        value, shape = outs[i], shape_of(atom)
        for cut in jaxprs.mesh_cuts(eqn, "out", i):
            value, shape = _blocks_joined(walk, value, shape, cut)
        # Along other axes all devices have the same.
        left = dict.fromkeys(walk.loops_here)
        outs[i] = value.moved(range(len(shape)), shape, left)
    return outs


def _block_of(walk: Walk, value: Value, shape: Shape, cut: jaxprs.Cut):
    dim, names, count = cut
    loop, block = walk.loop(names), shape[dim] // count
    split = (*shape[:dim], count, block, *shape[dim + 1 :])
    local = (*shape[:dim], block, *shape[dim + 1 :])
    to = [loop if j == dim else j - (j > dim) for j in range(len(split))]
    part = value.mapped(lambda p: pieces.reshaped(p, shape, split))
    return part.moved(to, local), local


def _blocks_joined(walk: Walk, value: Value, local: Shape, cut: jaxprs.Cut):
    dim, names, count = cut
    loop = walk.loop(names)
    split = (*local[:dim], count, *local[dim:])
    shape = (*local[:dim], count * local[dim], *local[dim + 1 :])
    to = [j + (j >= dim) for j in range(len(local))]
    apart = value.moved(to, split, {loop: dim})
    return apart.mapped(lambda p: pieces.reshaped(p, split, shape)), shape


@rule("reduce_window_max reduce_window_min select_and_gather_add")
def pooled(walk: Walk, eqn: Any, values: list[Value]) -> Value:
    if values[0].kind == Kind.PARAMETER:
        return walk.unknown(eqn, values)
    return mixed(values, nonlinear(values))

"""How numbers that are known when a function is traced go through each primitive.

A rule gets the equation and the values of its operands, arrays with the axes of marks.
It returns `None` for values that it does not know, or that are too large.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .marks import full, reshaped


#: Known entries of a variable, or `None`.
Value = np.ndarray | None

#: The most entries of a value. Indices of layers have fewer.
MOST = 1 << 14

#: A function from an equation and its operands' values to the value of its result.
ValueRule = Callable[[Any, list[np.ndarray]], Value]


def of_entries(function: Callable[..., Any]) -> ValueRule:
    def rule(eqn: Any, values: list[np.ndarray]) -> Value:
        shape = np.broadcast_shapes(*(x.shape for x in values))
        return np.asarray(function(*values)) if math.prod(shape) <= MOST else None

    return rule


def divided(eqn: Any, values: list[np.ndarray]) -> Value:
    a, b = values
    is_float = any(x.dtype.kind == "f" for x in values)
    # Integers are rounded toward zero.
    rule = of_entries(np.divide if is_float else lambda a, b: (a - np.fmod(a, b)) // b)
    return rule(eqn, [a, b]) if b.all() else None


def rest(eqn: Any, values: list[np.ndarray]) -> Value:
    return of_entries(np.fmod)(eqn, values) if values[1].all() else None


def reshape(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, (x,) = len(eqn.frame.lead), values
    old, new = eqn.inputs()[0].shape, eqn.output().shape
    is_turned = eqn.name == "reshape" and eqn.jaxpr_eqn.params.get("dimensions")
    is_large = math.prod((*x.shape[:lead], *old)) > MOST
    if math.prod(x.shape[lead:]) > 1 and (is_turned or is_large):
        return None
    return reshaped(x, lead, old, new)


def broadcast(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, (x, *_) = len(eqn.frame.lead), values
    shape = [*x.shape[:lead], *[1] * len(eqn.output().shape)]
    for d, out_d in enumerate(eqn.jaxpr_eqn.params["broadcast_dimensions"]):
        shape[lead + out_d] = x.shape[lead + d]
    return x.reshape(shape)


def transpose(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, order = len(eqn.frame.lead), eqn.jaxpr_eqn.params["permutation"]
    return values[0].transpose([*range(lead), *(lead + d for d in order)])


def rev(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, dims = len(eqn.frame.lead), eqn.jaxpr_eqn.params["dimensions"]
    return np.flip(values[0], tuple(lead + d for d in dims))


def iota(eqn: Any, values: list[np.ndarray]) -> Value:
    d, atom = eqn.jaxpr_eqn.params["dimension"], eqn.output()
    shape = [1] * atom.rank
    shape[atom.lead + d] = -1
    return np.arange(atom.shape[d]).reshape(shape) if atom.shape[d] <= MOST else None


def static_slice(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, params, (x,) = len(eqn.frame.lead), eqn.jaxpr_eqn.params, values
    steps = params["strides"] or [1] * len(params["start_indices"])
    places = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    cut = [slice(*place) for place in places]
    sizes = zip(cut, x.shape[lead:], strict=True)
    return x[
        (*[slice(None)] * lead, *(part if n > 1 else slice(None) for part, n in sizes))
    ]


def concatenate(eqn: Any, values: list[np.ndarray]) -> Value:
    is_new = eqn.name == "stack"  # makes the dimension, from JAX 0.12 on
    d = eqn.jaxpr_eqn.params["axis" if is_new else "dimension"]
    axis = len(eqn.frame.lead) + d
    if is_new:
        values = [np.expand_dims(x, axis) for x in values]
    sizes = [1 if is_new else x.shape[d] for x in eqn.inputs()]
    values = [full(x, axis, n) for x, n in zip(values, sizes, strict=True)]
    rest = ((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in values)
    shape = list(np.broadcast_shapes(*rest))
    if math.prod(shape) * sum(sizes) > MOST:
        return None
    shapes = [[*shape[:axis], n, *shape[axis + 1 :]] for n in sizes]
    return np.concatenate(list(map(np.broadcast_to, values, shapes)), axis)


def dynamic_slice(eqn: Any, values: list[np.ndarray]) -> Value:
    lead, (x, *starts) = len(eqn.frame.lead), values
    shape, sizes = eqn.inputs()[0].shape, eqn.output().shape
    for d, (n, start) in enumerate(zip(sizes, starts, strict=True)):
        if x is not None and n < shape[d]:
            start = np.clip(start.reshape(start.shape[:lead]), 0, shape[d] - n)
            places = start[..., None] + np.arange(n)
            rows = np.moveaxis(full(x, lead + d, shape[d]), lead + d, lead)
            taken = _taken(rows, places)
            x = taken if taken is None else np.moveaxis(taken, lead, lead + d)
    return x


def gather(eqn: Any, values: list[np.ndarray]) -> Value:
    """Returns the rows of an array that indices pick along one axis."""
    lead, (x, indices), params = len(eqn.frame.lead), values, eqn.jaxpr_eqn.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape, rank = eqn.inputs()[0].shape, len(eqn.output().shape)
    picked = numbers.start_index_map
    kept = [n for d, n in enumerate(shape) if d not in picked]
    is_row = numbers.collapsed_slice_dims == picked and len(picked) == 1
    is_row &= numbers.offset_dims == tuple(range(rank - len(kept), rank))
    if not is_row or [*sizes] != [1 if d in picked else n for d, n in enumerate(shape)]:
        return None
    axis = lead + picked[0]
    rows = np.moveaxis(full(x, axis, shape[picked[0]]), axis, lead)
    return _taken(rows, np.clip(indices[..., 0], 0, shape[picked[0]] - 1), lead)


def _taken(rows: np.ndarray, places: np.ndarray, lead: int | None = None) -> Value:
    """Returns the rows, along the first axis after the lead, at some places."""
    lead = places.ndim - 1 if lead is None else lead
    rest = rows.shape[lead + 1 :]
    lead_shape = np.broadcast_shapes(rows.shape[:lead], places.shape[:lead])
    count = math.prod(places.shape[lead:])
    if math.prod(lead_shape) * math.prod(rest) * max(count, rows.shape[lead]) > MOST:
        return None
    flat = places.reshape((*places.shape[:lead], count, *[1] * len(rest)))
    flat = np.broadcast_to(flat, (*lead_shape, count, *rest))
    rows = np.broadcast_to(rows, (*lead_shape, *rows.shape[lead:]))
    taken = np.take_along_axis(rows, flat, lead)
    return taken.reshape((*lead_shape, *places.shape[lead:], *rest))


def chosen(which: Any, *cases: Any) -> Any:
    return np.choose(which.astype(int), np.broadcast_arrays(*cases))


def same(eqn: Any, values: list[np.ndarray]) -> Value:
    return values[0]


def clamped(low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)

"""Containers of every kind that a pytree may be made of."""

import dataclasses
import itertools
import re
import typing
from typing import Any

import flax.linen as nn
import flax.struct
import jax
from flax import nnx
from flax.core import freeze, unfreeze
from internals import paths

import muonclip_jax as mc


def named_tuple(**fields):
    return typing.NamedTuple("Fields", [(name, Any) for name in fields])(**fields)


def struct(**fields):
    kind = type("Struct", (), {"__annotations__": dict.fromkeys(fields, Any)})
    return flax.struct.dataclass(kind)(**fields)


def registered(**fields):
    kind = dataclasses.make_dataclass("Registered", fields)
    return jax.tree_util.register_dataclass(kind, list(fields), [])(**fields)


class Module(nnx.Module):
    def __init__(self, **fields):
        for name, field in fields.items():
            setattr(self, name, nnx.data(field))


def variables(**fields):
    """A module whose arrays are variables, as they usually are."""
    leaf = {
        n: nnx.Param(x) if isinstance(x, jax.Array) else x for n, x in fields.items()
    }
    return Module(**leaf)


def _in_boxes(tree):
    """Linen's two kinds of boxes in turn, as `nn.with_partitioning` makes them."""
    kinds = itertools.cycle([nn.Partitioned, nn.LogicallyPartitioned])
    return _wrapped(tree, lambda x: next(kinds)(x, names=(None,) * x.ndim))


def _wrapped(tree, wrap):
    """Leaves that are no arrays are left alone, as masked ones are."""
    is_array = paths.is_array
    return jax.tree.map(lambda x: wrap(x) if is_array(x) else x, tree)


def unwrapped(tree):
    """Plain dicts and arrays again."""

    def is_box(x):
        return isinstance(x, nn.meta.AxisMetadata | nnx.Variable)

    def contents(x):
        if isinstance(x, nnx.Variable):
            return x.get_value()
        return x.value if is_box(x) else x

    return unfreeze(jax.tree.map(contents, tree, is_leaf=is_box))


#: The same params as the libraries hand them over.
WRAP = {
    "plain": lambda tree: tree,
    "FrozenDict": lambda tree: freeze(tree) if isinstance(tree, dict) else tree,
    "Linen boxes": _in_boxes,
    "NNX variables": lambda tree: _wrapped(tree, nnx.Param),
}


def passed_in(kind, monkeypatch):
    """Lets the public functions read the params of a test in another container."""

    def in_container(function):
        return lambda params, *args, **options: unwrapped(
            function(WRAP[kind](unwrapped(params)), *args, **options)
        )

    for name in ("flax_dimension_numbers", "matrix_mask", "describe", "clip_qk"):
        monkeypatch.setattr(mc, name, in_container(getattr(mc, name)))


def table(params, **options):
    """Path to `(count, fan_in, fan_out)`, or `None` for AdamW, as `describe` says."""
    found = {}
    text = mc.describe(params, attention=[], collapse=False, **options)
    for row in text.split("\n\n")[0].splitlines()[1:]:
        path, _, matrices, *_ = re.split("  +", row)
        sizes = matrices.split(" x ")
        found[path] = None if len(sizes) < 3 else tuple(map(int, sizes))
    return found

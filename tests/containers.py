"""Containers of every kind that a pytree may be made of."""

import dataclasses
import typing
from typing import Any

import flax.struct
import jax
from flax import nnx


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

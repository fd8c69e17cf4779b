"""`read_model`: what a function does with every parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._model.attention_layers import AttentionLayer
from .._parameters import paths
from . import jaxprs, products, rules  # noqa: F401  (these register the rules)
from .layers import attention_layers
from .naming import named_layers
from .verdicts import Verdict, verdicts
from .walk import walked


@dataclasses.dataclass(frozen=True)
class ModelReading:
    dimension_numbers: Any
    labels: Any
    attention: tuple[AttentionLayer, ...]
    _paths: tuple[paths.Path, ...] = ()
    _shapes: tuple = ()
    _verdicts: tuple[Verdict, ...] = ()


def read_model(fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any):
    tree = paths.flatten(params)
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if paths.is_array(x) else x
        for x in tree.leaves
    ]
    arrays = [i for i, x in enumerate(leaves) if paths.is_array(x)]
    others, treedef = jax.tree.flatten((args, kwargs))
    data = [i for i, x in enumerate(others) if paths.is_array(x)]

    def run(*flat: Any) -> Any:
        own, rest = list(leaves), list(others)
        for i, x in zip(arrays, flat, strict=False):
            own[i] = x
        for i, x in zip(data, flat[len(arrays) :], strict=True):
            rest[i] = x
        args, kwargs = treedef.unflatten(rest)
        return fun(tree.unflatten(own), *args, **kwargs)

    inner, _ = jaxprs.trace(run, *[leaves[i] for i in arrays], *[others[i] for i in data])
    shapes = [tuple(leaves[i].shape) for i in arrays]
    floats = [jnp.issubdtype(leaves[i].dtype, jnp.inexact) for i in arrays]
    walk, outs = walked(inner, shapes, floats)
    layers = attention_layers(walk)
    heads_at = {at for layer in layers for at in layer.axes}
    found = verdicts(walk, outs, floats, heads_at)
    by_leaf: list[Any] = [None] * len(leaves)
    labels: list[Any] = ["vector"] * len(leaves)
    for i, v in zip(arrays, found, strict=True):
        by_leaf[i], labels[i] = v.numbers, v.label
    r = ModelReading(
        tree.unflatten(by_leaf), tree.unflatten(labels), (), tree.paths, tuple(shapes), tuple(found)
    )
    object.__setattr__(r, "walk", walk)
    object.__setattr__(r, "layers", named_layers(layers, [tree.paths[i] for i in arrays], shapes))
    return r

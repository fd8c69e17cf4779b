"""LoRA: every matrix stays as it is, and a product of two factors is added to it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


Adapters = dict[str, dict[str, jax.Array]]  # by the place of the leaf


def draw_adapters(key: jax.Array, params: Any, rank: int) -> Adapters:
    """`a` of `(inputs, rank)`, drawn, and `b` of `(rank, outputs)`, zero."""
    adapters = {}
    for place, leaf, inputs in _matrices(params):
        a = jax.random.normal(jax.random.fold_in(key, place), (inputs, rank))
        b = jnp.zeros((rank, leaf.size // inputs))
        adapters[str(place)] = {"a": a / math.sqrt(inputs), "b": b}
    return adapters


def adapted(params: Any, adapters: Adapters) -> Any:
    """The params with the product of each pair of factors added."""
    leaves, structure = jax.tree.flatten(params)
    for place, factors in adapters.items():
        leaf = leaves[int(place)]
        product = factors["a"] @ factors["b"]
        leaves[int(place)] = leaf + product.reshape(leaf.shape)
    return jax.tree.unflatten(structure, leaves)


def only_b(adapters: Adapters) -> Any:
    """Dimension numbers of the factors: `b` is a matrix, `a` goes to AdamW."""
    return {place: {"a": None, "b": MuonDimensionNumbers()} for place in adapters}


def is_numbers(x: Any) -> bool:
    """Whether a node of a tree of dimension numbers is a leaf of it."""
    return x is None or isinstance(x, MuonDimensionNumbers)


def _matrices(params: Any) -> list[tuple[int, Any, int]]:
    """Place, leaf and inputs of every matrix; inputs come first in all kernels here."""
    numbers = mc.flax_dimension_numbers(params)
    of_leaves = jax.tree.leaves(numbers, is_leaf=is_numbers)
    leaves = jax.tree.leaves(params)
    return [
        (place, leaf, math.prod(leaf.shape[i] for i in _axes(dims)))
        for place, (leaf, dims) in enumerate(zip(leaves, of_leaves, strict=True))
        if dims is not None
    ]


def _axes(dims: MuonDimensionNumbers) -> tuple[int, ...]:
    axes = dims.reduction_axis
    return (axes,) if isinstance(axes, int) else tuple(axes)

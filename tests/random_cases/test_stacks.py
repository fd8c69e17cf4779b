"""Stacked layers, at any axis, are what each of them is alone."""

import jax
import numpy as np
import pytest
from helpers import is_numbers
from optax.contrib import MuonDimensionNumbers
from seeds import chance, family, pick, told
from trees import abstract, is_shape

import muonclip_jax as mc


LAYERS = 5  # unlike any other size
FEATURES = 6


def attention(generator):
    heads, key_heads = pick(generator, (2, 1), (2, 2), (4, 2), (1, 1))
    sizes = {"query": heads, "key": key_heads, "value": key_heads}
    module = {n: {"kernel": (FEATURES, h, 3)} for n, h in sizes.items()}
    module["out"] = {"kernel": (heads, 3, FEATURES)}
    if chance(generator, 0.5):
        for name, size in sizes.items():
            module[name]["bias"] = (size, 3)
        module["out"]["bias"] = (FEATURES,)
    return module


MODULES = {
    "attention": attention,
    "dense": lambda _: {"kernel": (FEATURES, 4), "bias": (4,)},
    "up": lambda _: {"kernel": (FEATURES, 1)},
    "conv": lambda _: {"kernel": (3, 3, FEATURES, 4), "bias": (4,)},
    "conv_narrow": lambda _: {"kernel": (3, FEATURES, 4)},
    "norm": lambda _: {"scale": (FEATURES,)},
    "sinks": lambda _: {"sinks": (2,), "scalar": ()},
    "gate": lambda _: {"gate": (2, 3)},
    "moe": lambda _: {"expert": {"kernel": (3, FEATURES, 4)}},
}


def place(axis, rank):
    """Where the layers are in a leaf that has so many axes with them."""
    if rank == 1:
        return 0
    return axis if axis >= 0 else axis + rank


def stacked(shape, axis):
    position = place(axis, len(shape) + 1)
    return (*shape[:position], LAYERS, *shape[position:])


def axes_in_layer(numbers, rank, position):
    """Reduction and output axes, from the front, of a leaf without its layers."""
    if numbers is None:
        return None
    found = []
    for axes in numbers:
        axes = [axis % rank for axis in np.atleast_1d(axes)]
        assert position not in axes, "layers are mixed into one matrix"
        found.append([axis - (axis > position) for axis in axes])
    return found


def numbers_of(shapes, **options):
    found = mc.flax_dimension_numbers(abstract(shapes), **options)
    return jax.tree.leaves(found, is_leaf=is_numbers)


def check(seed):
    generator = np.random.default_rng(seed)
    names = generator.choice(sorted(MODULES), generator.integers(1, 5), replace=False)
    layer = {str(name): MODULES[name](generator) for name in names}
    axis, per_head = pick(generator, 0, 1, 2, -1, -2, -3, 7, -7), chance(generator, 0.3)
    # Takes what the layer gives, which would be an output head otherwise.
    stray = {"other": {"kernel": (4, FEATURES)}}
    shapes = jax.tree.leaves(layer, is_leaf=is_shape)
    fits = all(0 <= place(axis, len(s) + 1) <= len(s) for s in shapes if s)
    with told(seed, layer=layer, axis=axis, per_head=per_head):
        if not fits:
            some = jax.tree.map(lambda s: (*s, LAYERS), layer, is_leaf=is_shape)
            with pytest.raises(ValueError, match="stack_axes"):
                numbers_of({"layers": some}, stack_axes={"layers": axis})
            return
        try:
            *alone, _ = numbers_of({"layers": layer} | stray, per_head=per_head)
        except ValueError as error:
            assert "cannot decide" in str(error)
            return  # names leave a leaf of one layer open, too
        tree = jax.tree.map(lambda s: stacked(s, axis), layer, is_leaf=is_shape)
        options = {"stack_axes": {"layers": axis}, "per_head": per_head}
        *found, other = numbers_of({"layers": tree} | stray, **options)
        assert other == MuonDimensionNumbers(-2, -1)
        for shape, numbers, expected in zip(shapes, found, alone, strict=True):
            rank = len(shape) + 1
            actual = axes_in_layer(numbers, rank, place(axis, rank))
            desired = axes_in_layer(expected, len(shape), len(shape))
            assert actual == desired, (shape, numbers)


test_stacks = family(check, 300, quick=300, always=300)

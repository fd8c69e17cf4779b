"""Which head owns each entry of a leaf: as written, against loops over all entries."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import one_at_a_time

import muonclip_jax as mc


def owners_by_loops(shape, axes, split=(), split_axis=-1, parts=()):
    """Of one layer: each entry's place in the view, and what number that is of heads.

    `parts` are pairs of an axis of the view and the range that is meant.
    """
    at = len(shape) + split_axis
    view = (*shape[:at], *(split or shape[at : at + 1]), *shape[at + 1 :])
    ranges = {axis % len(view): range(*ends) for axis, ends in parts}
    ranges = [ranges.get(i, range(n)) for i, n in enumerate(view)]
    found = np.full(view, -1)
    for place in itertools.product(*ranges):
        head = 0
        for axis in axes:
            own = ranges[axis]
            head = head * len(own) + place[axis] - own.start
        found[place] = head
    return found.reshape(shape)


# Of one layer: its shape, how it is written, and the same for the loops.
WRITTEN = {
    "an axis": ((5, 3, 2), {"ndim": 3}, {"axes": [-2]}),
    "flat": ((5, 6), {"ndim": 2, "split": (3, -1)}, {"axes": [-2], "split": (3, 2)}),
    "outputs first": (
        (6, 5),
        {"ndim": 2, "axis": -3, "split": (3, 2), "split_axis": -2},
        {"axes": [-3], "split": (3, 2), "split_axis": -2},
    ),
    "heads minor": (
        (5, 6),
        {"ndim": 2, "axis": -1, "split": (2, 3)},
        {"axes": [-1], "split": (2, 3)},
    ),
    "fused": (
        (5, 18),
        {"ndim": 2, "split": (3, 3, 2), "part": (-3, slice(1, 2))},
        {"axes": [-2], "split": (3, 3, 2), "parts": [(-3, (1, 2))]},
    ),
    "heads after others, and a part of each": (
        (4, 7, 5),
        {"ndim": 3, "part": ((-2, slice(2, 6)), (-1, slice(1, 4)))},
        {"axes": [-2], "parts": [(-2, (2, 6)), (-1, (1, 4))]},
    ),
    "groups counted by a later axis": (
        (2, 4, 3, 2),
        {"ndim": 4, "axis": (-2, -4)},
        {"axes": [-2, -4]},
    ),
    "shared": ((6,), {"ndim": 1, "axis": None}, {"axes": []}),
    "shared, in part": (
        (6,),
        {"ndim": 1, "axis": None, "part": (-1, slice(2, 4))},
        {"axes": [], "parts": [(-1, (2, 4))]},
    ),
}
STACKS = {"none": (0, ()), "in front": (0, (4, 2)), "after an axis": (1, (3,))}


def made(name, stack="none"):
    layer, how, loops = WRITTEN[name]
    start, depth = STACKS[stack]
    shape = (*layer[:start], *depth, *layer[start:])
    leaf = mc.HeadLeaf("w", **how, stack_axis=start).owned(shape)
    return leaf, shape, owners_by_loops(layer, **loops)


@pytest.mark.parametrize("name, stack", one_at_a_time(WRITTEN, STACKS))
def test_scales_are_those_of_loops(name, stack):
    leaf, shape, head_ids = made(name, stack)
    assert leaf.heads == head_ids.max() + 1
    start, sizes = STACKS[stack]
    row = np.random.default_rng(0).uniform(size=(*sizes, leaf.heads)).astype("f4")
    expected = np.ones(shape, "f4")
    for layer in np.ndindex(sizes):
        for place in np.ndindex(head_ids.shape):
            if head_ids[place] >= 0:
                at = (*place[:start], *layer, *place[start:])
                expected[at] = row[(*layer, head_ids[place])]
    found = np.broadcast_to(leaf.spread(jnp.asarray(row)), shape)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.broadcast_to(leaf.spread(row, 1), shape), expected)


def test_parts_of_one_leaf_are_apart_if_no_entry_is_in_both():
    thirds = [
        mc.HeadLeaf("w", 2, split=(3, 2, 1), part=(-3, slice(i, i + 1))).owned((5, 6))
        for i in range(3)
    ]
    whole = made("flat")[0]
    for a, b in itertools.product([*thirds, whole], repeat=2):
        assert a.is_apart_from(b) == (a != b and whole not in (a, b))


def test_layers_of_a_stack_and_one_that_is_picked_are_not_apart():
    every = mc.HeadLeaf("w", 2, split=(3, 2)).owned((4, 5, 6))
    one, other = (
        mc.HeadLeaf("w", 3, split=(3, 2), part=(-4, slice(i, i + 1))).owned((4, 5, 6))
        for i in range(2)
    )
    assert not every.is_apart_from(one) and one.is_apart_from(other)


@pytest.mark.parametrize(
    "leaf",
    [
        mc.HeadLeaf("w", 3),
        mc.HeadLeaf("w", 2, split=(4, -1)),
        mc.HeadLeaf("w", 2, axis=-3),
        mc.HeadLeaf("w", 2, split=(3, 2), part=(-4, slice(0, 1))),
        mc.HeadLeaf("w", 2, split=(3, 2), split_axis=-3),
        mc.HeadLeaf("w", 2, split=(3, 3)).owned((5, 9)),
        mc.HeadLeaf("w", 2, split=(3, 2)).owned((2, 5, 6)),
    ],
)
def test_what_does_not_fit_has_no_owners(leaf):
    assert leaf.owned((5, 6)) is None

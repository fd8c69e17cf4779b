"""Which leaves are scaled for which heads, and by what share of gamma.

A logit is a sum of products, of an entry of the query's and one of the key's leaves. It
is scaled by gamma if every such pair is in total: all leaves of a side get one share of
it, and both shares make up the whole. But for the sake of one head nothing may be
scaled that others have, too. So, in this order:

1. What is also a rotary query takes the whole, and the other side nothing; and entries
   that are query and key are both factors of their product: half for each side,
   whatever alpha is. Of both at once no shares are exact, which is an error.
2. A side with a leaf that several heads or several layers share is left alone, and the
   other takes the whole, as the paper has it for the rotary key (arXiv:2507.20534,
   algorithm 1; of keys that groups of heads or layers share it says nothing).
3. Else the query takes alpha of it, and the key the rest.

Where that would leave a layer without anything to scale, all layers that share entries
with it are clipped as one: the rule is applied to the leaves of all of them, and heads
that have a scaled entry in common get the smallest gamma of them. No head stays above
the threshold; those that share with a head further above it end below it.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import numpy as np

from .._model.attention_layers import ROLES
from .._model.owned_leaf import joined
from .._parameters.paths import Path, show_all, show_module
from .bound_layer import BoundLayer, Use


Share = Literal["alpha", "rest", "half", "whole"]


#: A leaf that is scaled for the heads of its layer, and by what share of their gamma.
Scaled = tuple[Use, Share]


def scaled_leaves(layers: Sequence[BoundLayer]) -> list[Scaled]:
    """The scales of all layers, by the rule above."""
    # By `id`, since equal leaves of two layers are two uses. All of them are alive in
    # `layers` as long as the set is.
    contested: set[int] = set()  # uses of entries that other layers have, too
    numbers_of = []
    for uses in _meeting(use for layer in layers for use in layer.uses):
        numbers = [
            use.leaf.spread(np.full(use.row, use.layer.index), -1) for use in uses
        ]
        numbers_of.append(numbers)
        # The first layer that has an entry, and the last.
        is_common = _first_of(numbers) != _first_of(numbers[::-1])
        pairs = zip(uses, numbers, strict=True)
        contested |= {id(x) for x, n in pairs if (is_common & (n >= 0)).any()}
    first_of = _connected(len(layers), numbers_of)
    groups: dict[int, list[BoundLayer]] = {}
    for layer in layers:
        groups.setdefault(int(first_of[layer.index]), []).append(layer)
    scaled: list[Scaled] = []
    for group in groups.values():
        # Each layer by itself as long as that leaves alone what others have, too: then
        # no layer is scaled for another's logits. Only where it cannot be are all one.
        found = [x for layer in group for x in _scaled_in([layer], contested)]
        if any(id(use) in contested for use, _ in found):
            found = _scaled_in(group, set())
        scaled += found
    return scaled


def _scaled_in(
    layers: Sequence[BoundLayer], contested: Collection[int]
) -> list[Scaled]:
    """The scales of layers as of one, of which some entries are best left alone."""
    every = [use for layer in layers for use in layer.uses]
    query, alone, key = ([x for x in every if x.role == role] for role in ROLES)

    # What has a partner that stays elsewhere takes the whole for it, here as well.
    of_query, of_key, tied = (
        any(
            a.path == b.path and not a.leaf.is_apart_from(b.leaf)
            for a, b in itertools.product(one, other)
        )
        for one, other in ((query, alone), (key, alone), (query, key))
    )
    if of_query + of_key + tied > 1:
        names = ", ".join(repr(show_module(layer.path)) for layer in layers)
        leaves = show_all(dict.fromkeys(use.path for use in every))
        raise ValueError(
            f"no scaling of {leaves} brings the logits of attention {names} to the "
            "threshold: two pairs among query, key and rotary_query have entries in "
            "common, and need different factors. Leave the layer out of attention="
        )
    query_stays, key_stays = (
        any(id(x) in contested or not x.is_whole for x in side) for side in (query, key)
    )
    shares: tuple[Share | None, Share | None] = "alpha", "rest"
    if of_query or of_key:
        shares = ("whole", None) if of_query else (None, "whole")
    elif tied or (query_stays and key_stays):
        shares = "half", "half"
    elif query_stays or key_stays:
        shares = ("whole", None) if key_stays else (None, "whole")
    of_sides = zip((query, key, alone), (*shares, "whole"), strict=True)
    return [(x, share) for side, share in of_sides if share for x in side]


def clipped_together(
    layers: Sequence[BoundLayer], scaled: Sequence[Scaled]
) -> np.ndarray:
    """For every head of the row of all layers the first that it is clipped with."""
    numbers_of = []
    # Heads meet in two ways: by one leaf that several of them own at once, as a gain or
    # a key of grouped queries, and by entries that several layers use.
    for use in (use for use, _ in scaled if not use.is_whole):
        first = use.first_heads()
        every = np.arange(first.size).reshape(first.shape) + use.layer.start
        numbers_of.append([first, every])
    for uses in _meeting(use for use, _ in scaled):
        rows = [np.unique(use.first_heads()).reshape(use.row) for use in uses]
        pairs = zip(uses, rows, strict=True)
        numbers_of.append([use.leaf.spread(row, -1) for use, row in pairs])
    count = sum(math.prod(layer.shape) for layer in layers)
    return _connected(count, numbers_of)


def _meeting(uses: Iterable[Use]) -> list[list[Use]]:
    """The uses of one leaf, leaf by leaf, where some of its entries have several."""
    by_path: dict[Path, list[Use]] = {}
    for use in uses:
        by_path.setdefault(use.path, []).append(use)
    several = (of for of in by_path.values() if len(of) > 1)
    return [
        of for of in several if np.any(sum(x.leaf.mask.astype(int) for x in of) > 1)
    ]


def _first_of(numbers: Sequence[np.ndarray]) -> np.ndarray:
    """The first number of each entry."""
    return functools.reduce(lambda a, b: np.where(a < 0, b, a), numbers)


def _connected(count: int, numbers_of: Iterable[Sequence[np.ndarray]]) -> np.ndarray:
    """For each number the smallest that some entry has, too, in one step or several."""
    one, other = [np.zeros(0, int)], [np.zeros(0, int)]
    for numbers in numbers_of:
        first = _first_of(numbers)
        for each in numbers:
            pair = np.broadcast_arrays(first, each)
            one.append(pair[0][pair[1] >= 0])
            other.append(pair[1][pair[1] >= 0])
    return joined(count, np.concatenate(one), np.concatenate(other))

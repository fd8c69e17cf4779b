"""The share of gamma that each side of a product of query and key is scaled by.

A clip scales a logit by gamma if the shares of query and key make up the whole gamma,
in each product that the logit is a sum of. Entries of a leaf have one share, wherever
they are used. No head may scale entries that other heads have, too. So, in this order:

1. A side that no parameter scales stays, and the other side takes the whole. The key of
   a rotary query is such a side.
2. A side with a leaf that several heads or several layers share stays, and the other
   takes the whole, as the paper has it for the rotary key (arXiv:2507.20534, algorithm
   1; the paper does not mention keys that groups of heads or layers share).
3. Entries that are query and key of one product are both its factors: half for each
   side, whatever alpha is. If both sides are shared, each takes half, too.
4. Else the query takes alpha, and the key the rest.

If a layer then has nothing left to scale, all layers that share entries with it are
clipped as one: the rule is applied to the leaves of all of them, and heads that have a
scaled entry in common get the smallest gamma of them. No head stays above the
threshold; heads that share with a head further above it end below it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from .._parameters.paths import Path, show_all, show_module
from .attention_layers import ROLES
from .bound_layer import BoundLayer, Use


Share = Literal["alpha", "rest", "half", "whole"]

#: A leaf that is scaled for the heads of its layer, and by what share of their gamma.
Scaled = tuple[Use, Share]


def shares_of(
    pairs: Sequence[tuple[list[Any], list[Any]]], is_shared: Callable[[Any], bool]
) -> list[tuple[Share | None, Share | None]] | None:
    """Returns the shares of query and key in each product, `None` for one that stays.

    Each side lists its leaves, as `Use` or anything else that has `meets`. The result
    is `None` if no shares are exact.
    """
    # A share is a power of gamma, and the powers of a product's sides add up to 1. So
    # all sides that are connected have a power x or 1 - x. Number i stands for the
    # power of side i, and number n + i for one minus this power; equal powers join.
    sides = [side for pair in pairs for side in pair]
    n = len(sides)
    equal = [(i, n + (i ^ 1)) for i in range(n)]
    for i, j in itertools.combinations(range(n), 2):
        if any(a.meets(b) for a, b in itertools.product(sides[i], sides[j])):
            equal += [(i, j), (n + i, n + j)]
    first = _joined(2 * n, equal)
    stays = np.zeros(2 * n, int)  # 1 where a side had better stay, 2 where it has to
    wishes = [int(any(map(is_shared, side))) if side else 2 for side in sides]
    np.maximum.at(stays, first[:n], wishes)
    shares: list[Share | None] = []
    for own, other in zip(first[:n], first[n:], strict=True):
        if stays[own] == stays[other] == 2:
            return None
        if own == other or stays[own] == stays[other] == 1:
            shares.append("half")
        elif stays[own] == stays[other]:
            # The smallest number of all that are connected is that of a query.
            shares.append("alpha" if own < other else "rest")
        else:
            shares.append("whole" if stays[own] < stays[other] else None)
    return [*zip(shares[::2], shares[1::2], strict=True)]


def scaled_leaves(layers: Sequence[BoundLayer]) -> list[Scaled]:
    """The scales of all layers, by the rule above."""
    # By `id`, since equal leaves of two layers are two uses. All of them are alive in
    # `layers` as long as the set is.
    contested: set[int] = set()  # uses of entries that other layers have, too
    numbers: list[tuple[int, int]] = []  # of layers that have entries in common
    for uses in _meeting(use for layer in layers for use in layer.uses):
        for one, other in itertools.combinations(uses, 2):
            if one.layer is not other.layer and one.meets(other):
                contested |= {id(one), id(other)}
                numbers.append((one.layer.index, other.layer.index))
    first_of = _joined(len(layers), numbers)
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
    pairs = [pair for pair in ((query, key), (alone, [])) if any(pair)]
    shares = shares_of(pairs, lambda x: id(x) in contested or not x.is_whole)
    if shares is None:
        names = ", ".join(repr(show_module(layer.path)) for layer in layers)
        leaves = show_all(dict.fromkeys(use.path for use in every))
        raise ValueError(
            f"no scaling of {leaves} brings the logits of attention {names} to the "
            "threshold: two pairs among query, key and rotary_query have entries in "
            "common, and need different factors. Leave the layer out of attention="
        )
    return [
        (use, share)
        for pair, of_pair in zip(pairs, shares, strict=True)
        for side, share in zip(pair, of_pair, strict=True)
        for use in side
        if share
    ]


def clipped_together(
    layers: Sequence[BoundLayer], scaled: Sequence[Scaled]
) -> np.ndarray:
    """For every head of the row of all layers the first that it is clipped with."""
    pairs: set[tuple[int, int]] = set()
    # Heads meet in two ways: by one leaf that several of them own at once, as a gain or
    # a key of grouped queries, and by entries that several layers use.
    for use in (use for use, _ in scaled if not use.is_whole):
        first = use.first_heads().ravel()
        pairs |= {*zip(first.tolist(), itertools.count(use.layer.start))}
    for uses in _meeting(use for use, _ in scaled):
        rows = [
            use.leaf.spread(np.unique(use.first_heads()).reshape(use.row), -1)
            for use in uses
        ]
        # Each entry joins the first head that has it with all others that do.
        first = functools.reduce(lambda a, b: np.where(a < 0, b, a), rows)
        for row in rows:
            both = np.broadcast_arrays(first, row)
            pairs |= {*zip(*(x[both[1] >= 0].tolist() for x in both), strict=True)}
    return _joined(sum(math.prod(layer.shape) for layer in layers), pairs)


def _meeting(uses: Iterable[Use]) -> list[list[Use]]:
    """The uses of one leaf, leaf by leaf, where some of its entries have several."""
    by_path: dict[Path, list[Use]] = {}
    for use in uses:
        by_path.setdefault(use.path, []).append(use)
    several = (of for of in by_path.values() if len(of) > 1)
    return [
        of for of in several if np.any(sum(x.leaf.mask.astype(int) for x in of) > 1)
    ]


def _joined(count: int, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """For each number the smallest that a chain of pairs connects it with."""
    # Pairs are few, of layers or heads that share a leaf, so that every union may pass
    # over all numbers: no tree of parents is needed.
    found = np.arange(count)
    for one, other in pairs:
        low, high = sorted((found[one], found[other]))
        found[found == high] = low
    return found

"""The share of gamma for each side of a product of query and key.

A logit is a sum of products. A clip scales it by gamma if the shares of query and key
make up the whole gamma in each product. An entry of a leaf has one share, wherever it
is used. No head may scale entries that other heads have, too, unless they are
clipped together (below). The rules:

1. If no parameter scales a side, it stays, and the other side takes the whole. The key
   of a rotary query is such a side.
2. If several heads or several layers share a leaf of one side, it stays, and the other
   takes the whole, as in the paper for the rotary key (arXiv:2507.20534, algorithm 1;
   the paper does not mention keys that groups of heads or layers share).
3. If the same entries are query and key of one product, each side takes half, whatever
   alpha is. If both sides are shared, each takes half, too.
4. Otherwise the query takes alpha, and the key the rest.

If these rules leave a layer nothing to scale, all layers that share entries with it are
clipped as one: the rules apply to the leaves of all of them, and heads with a scaled
entry in common get their smallest gamma. A head that shares entries with a head further
above the threshold ends below it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from .._parameters.paths import Path, show_all, show_module
from .attention_layers import ROLES
from .bound_layer import BoundLayer, LeafInRole


Share = Literal["alpha", "rest", "half", "whole"]

#: A leaf that is scaled for the heads of its layer, and its share of their gamma.
LeafShare = tuple[LeafInRole, Share]


def roles_of(
    pairs: Sequence[tuple[list[Any], list[Any]]], heads: int
) -> tuple[list[Any], list[Any], list[Any]] | None:
    """Returns query, key and rotary query, so that their layer has its pairs' shares.

    A layer has all queries and all keys as one pair. If joining the pairs changes the
    shares, a side that takes the whole is a rotary query, and its partner, which stays,
    is not named. The result is `None` if no shares are exact.
    """
    query, key = ([x for pair in pairs for x in pair[i]] for i in (0, 1))
    shares, as_one = (
        _shares_of(x, lambda part: part.leaf.heads != heads)
        for x in (pairs, [(query, key)])
    )
    if shares is None:
        return None
    # A layer's query has no fewer heads than its key.
    is_query = {part.leaf.heads for part in query} <= {1, heads}
    if query and key and is_query and {*shares} == {*(as_one or ())}:
        return query, key, []
    roles = [], [], []
    for pair, of_pair in zip(pairs, shares, strict=True):
        for i, share in enumerate(of_pair):
            roles[2 if share == "whole" else i].extend(pair[i] if share else [])
    return roles


def _shares_of(
    pairs: Sequence[tuple[list[Any], list[Any]]], is_shared: Callable[[Any], bool]
) -> list[tuple[Share | None, Share | None]] | None:
    """Returns the shares of query and key in each product, `None` for one that stays.

    Each side lists its leaves, as `LeafInRole` or another type with `meets`. The result
    is `None` if no shares are exact.
    """
    # A share is a power of gamma. The powers of a product's two sides add up to 1, so
    # connected sides have a power x or 1 - x. Number i stands for the power of side i,
    # and number n + i for one minus this power; equal powers are joined. The other side
    # of the same product is i ^ 1: with one pair, query 0 and key 1, the number 2 is
    # one minus the query's power, which is the key's.
    sides = [side for pair in pairs for side in pair]
    n = len(sides)
    equal = [(i, n + (i ^ 1)) for i in range(n)]
    for i, j in itertools.combinations(range(n), 2):
        if any(a.meets(b) for a, b in itertools.product(sides[i], sides[j])):
            equal += [(i, j), (n + i, n + j)]
    first = _joined(2 * n, equal)
    reluctance = np.zeros(2 * n, int)  # 1 if a side is shared, 2 if it has no leaf
    of_sides = [int(any(map(is_shared, side))) if side else 2 for side in sides]
    np.maximum.at(reluctance, first[:n], of_sides)
    shares: list[Share | None] = []
    for power, complement in zip(first[:n], first[n:], strict=True):
        if reluctance[power] == reluctance[complement] == 2:
            return None
        if power == complement or reluctance[power] == reluctance[complement] == 1:
            shares.append("half")
        elif reluctance[power] == reluctance[complement]:
            # The smallest connected number belongs to a query.
            shares.append("alpha" if power < complement else "rest")
        else:
            is_free = reluctance[power] < reluctance[complement]
            shares.append("whole" if is_free else None)
    return [*zip(shares[::2], shares[1::2], strict=True)]


def scaled_leaves(layers: Sequence[BoundLayer]) -> list[LeafShare]:
    """Returns the scaled leaves of all layers, by the rules above."""
    # By `id`, because equal leaves of two layers are two uses. `layers` keeps all uses
    # alive as long as the set.
    contested: set[int] = set()  # uses of entries that other layers have, too
    numbers: list[tuple[int, int]] = []  # pairs of layers with entries in common
    for uses in _meeting(use for layer in layers for use in layer.uses):
        for one, other in itertools.combinations(uses, 2):
            if one.layer is not other.layer and one.meets(other):
                contested |= {id(one), id(other)}
                numbers.append((one.layer.index, other.layer.index))
    first_of = _joined(len(layers), numbers)
    groups: dict[int, list[BoundLayer]] = {}
    for layer in layers:
        groups.setdefault(int(first_of[layer.index]), []).append(layer)
    scaled: list[LeafShare] = []
    for group in groups.values():
        # Scale each layer by itself if it can leave shared entries alone: then no layer
        # is scaled for another's logits. Otherwise clip the whole group as one.
        group_scaled = [x for layer in group for x in _scaled_in([layer], contested)]
        if any(id(use) in contested for use, _ in group_scaled):
            group_scaled = _scaled_in(group, set())
        scaled += group_scaled
    return scaled


def _scaled_in(
    layers: Sequence[BoundLayer], contested: Collection[int]
) -> list[LeafShare]:
    """Returns the scaled leaves of layers clipped as one.

    A `contested` leaf stays if the other side can take the whole.
    """
    uses = [use for layer in layers for use in layer.uses]
    query, rotary, key = ([x for x in uses if x.role == role] for role in ROLES)
    pairs = [pair for pair in ((query, key), (rotary, [])) if any(pair)]
    shares = _shares_of(pairs, lambda x: id(x) in contested or not x.is_whole)
    if shares is None:
        names = ", ".join(repr(show_module(layer.path)) for layer in layers)
        leaves = show_all(dict.fromkeys(use.path for use in uses))
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
    layers: Sequence[BoundLayer], scaled: Sequence[LeafShare]
) -> np.ndarray:
    """Returns, for each head in the row of all layers, the first it is clipped with."""
    pairs: set[tuple[int, int]] = set()
    # Heads are clipped together if they share a leaf (a gain, or a key of grouped
    # queries), or if their layers use the same entries.
    for use in (use for use, _ in scaled if not use.is_whole):
        first = use.first_heads().ravel()
        pairs |= {*zip(first.tolist(), itertools.count(use.layer.start))}
    for uses in _meeting(use for use, _ in scaled):
        rows = [
            use.leaf.spread(np.unique(use.first_heads()).reshape(use.row_shape), -1)
            for use in uses
        ]
        # Each entry joins the first head that has it with all other heads that do.
        first = functools.reduce(lambda a, b: np.where(a < 0, b, a), rows)
        for row in rows:
            both = np.broadcast_arrays(first, row)
            pairs |= {*zip(*(x[both[1] >= 0].tolist() for x in both), strict=True)}
    return _joined(sum(math.prod(layer.shape) for layer in layers), pairs)


def _meeting(uses: Iterable[LeafInRole]) -> list[list[LeafInRole]]:
    """Returns the uses of each leaf that has entries with several uses."""
    by_path: dict[Path, list[LeafInRole]] = {}
    for use in uses:
        by_path.setdefault(use.path, []).append(use)
    several = (group for group in by_path.values() if len(group) > 1)
    return [
        group
        for group in several
        if np.any(sum(x.leaf.mask.astype(int) for x in group) > 1)
    ]


def _joined(count: int, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Returns, for each number, the smallest that a chain of pairs connects it to."""
    # Few layers or heads share a leaf, so each union may pass over all numbers; a tree
    # of parents is not needed.
    smallest = np.arange(count)
    for one, other in pairs:
        low, high = sorted((smallest[one], smallest[other]))
        smallest[smallest == high] = low
    return smallest

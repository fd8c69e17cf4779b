"""Which leaves are scaled for which heads, and by what share of gamma.

A logit is a sum of products, of an entry of the query's and one of the key's leaves. It
is scaled by gamma if every such pair is in total: all leaves of a side get one share of
it, and both shares make up the whole. But for the sake of one head nothing may be
scaled that others have, too. So, in this order:

1. Entries that are query and key are both factors of their product: half for each side,
   whatever alpha is.
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
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from .._model.attention_layers import ROLES
from .._model.owned_leaf import joined
from .._parameters.paths import Path
from .bound_layer import BoundLayer, Use


Share = Literal["alpha", "rest", "half", "whole"]


class Scaled(NamedTuple):
    """A leaf that is scaled for the heads of one layer, by a share of their gamma."""

    layer: int
    use: Use
    share: Share


def scaled_leaves(layers: Sequence[BoundLayer]) -> list[Scaled]:
    """What is scaled of all layers, by the rule above."""
    contested: set[int] = set()  # uses of entries that other layers have, too
    numbers_of = []
    every = [(i, use) for i, layer in enumerate(layers) for use in layer.uses]
    for uses in _by_path(every):
        if len({i for i, _ in uses}) < 2:
            continue
        numbers = [use.leaf.spread(np.full(use.row, i), -1) for i, use in uses]
        numbers_of.append(numbers)
        # The first layer that has an entry, and the last.
        is_common = _first_of(numbers) != _first_of(numbers[::-1])
        for (_, use), at in zip(uses, numbers, strict=True):
            contested |= {id(use)} if (is_common & (at >= 0)).any() else set()
    group_of = _connected(len(layers), numbers_of)
    scaled: list[Scaled] = []
    for first in np.unique(group_of):
        group = np.flatnonzero(group_of == first).tolist()
        found = [_scaled_in(layers, [i], contested) for i in group]
        if None in found:
            found = [_scaled_in(layers, group, set())]
        scaled += itertools.chain.from_iterable(x or () for x in found)
    return scaled


def _scaled_in(
    layers: Sequence[BoundLayer], group: Sequence[int], contested: Collection[int]
) -> list[Scaled] | None:
    """What is scaled of layers as of one; `None` if that is what others have, too."""
    every = [(i, use) for i in group for use in layers[i].uses]
    query, alone, key = ([x for x in every if x[1].role == role] for role in ROLES)

    def is_shared(side: Sequence[tuple[int, Use]]) -> bool:
        return any(id(x) in contested or not layers[i].is_whole(x) for i, x in side)

    def meet(one: Sequence[tuple[int, Use]], other: Sequence[tuple[int, Use]]) -> bool:
        return any(
            a.path == b.path and not a.leaf.is_apart_from(b.leaf)
            for (_, a), (_, b) in itertools.product(one, other)
        )

    query_stays, key_stays = is_shared(query), is_shared(key)
    if contested and ((query_stays and key_stays) or is_shared(alone)):
        return None
    # Entries whose other partner stays take the whole for it, so this one stays, too.
    query_stays |= meet(key, alone)
    key_stays |= meet(query, alone)
    shares: tuple[Share | None, Share | None] = "alpha", "rest"
    if meet(query, key) or (query_stays and key_stays):
        shares = "half", "half"
    elif query_stays or key_stays:
        shares = ("whole", None) if key_stays else (None, "whole")
    of_sides = zip((query, key, alone), (*shares, "whole"), strict=True)
    return [Scaled(*x, share) for side, share in of_sides if share for x in side]


def clipped_together(
    layers: Sequence[BoundLayer], scaled: Sequence[Scaled]
) -> np.ndarray:
    """For every head of the row of all layers the first that it is clipped with."""
    sizes = [int(np.prod(layer.shape)) for layer in layers]
    starts = [0, *itertools.accumulate(sizes)]
    numbers_of = []
    for i, use, _ in scaled:
        if not layers[i].is_whole(use):
            sharing = layers[i].sharing(use)
            here = np.arange(sharing.size).reshape(sharing.shape)
            numbers_of.append([starts[i] + here, starts[i] + sharing])
    for uses in _by_path([x[:2] for x in scaled]):
        if len(uses) > 1:
            rows = (
                starts[i] + layers[i].row_of(use, layers[i].sharing(use))
                for i, use in uses
            )
            pairs = zip(uses, rows, strict=True)
            numbers_of.append([use.leaf.spread(row, -1) for (_, use), row in pairs])
    return _connected(starts[-1], numbers_of)


def _by_path(uses: Iterable[tuple[int, Use]]) -> Iterable[list[tuple[int, Use]]]:
    found: dict[Path, list[tuple[int, Use]]] = {}
    for i, use in uses:
        found.setdefault(use.path, []).append((i, use))
    return found.values()


def _first_of(numbers: Sequence[np.ndarray]) -> np.ndarray:
    """The first number that is there (not -1) of each entry."""
    return functools.reduce(lambda a, b: np.where(a < 0, b, a), numbers)


def _connected(count: int, numbers_of: Iterable[Sequence[np.ndarray]]) -> np.ndarray:
    """For each number the smallest that shares an entry with it, in several steps too.

    Each array has the number of every entry of a leaf, to which it broadcasts.
    """
    one, other = [np.zeros(0, int)], [np.zeros(0, int)]
    for numbers in numbers_of:
        first = _first_of(numbers)
        for each in numbers:
            pair = np.broadcast_arrays(first, each)
            one.append(pair[0][pair[1] >= 0])
            other.append(pair[1][pair[1] >= 0])
    return joined(count, np.concatenate(one), np.concatenate(other))

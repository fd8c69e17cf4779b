"""Kernels that write the output, or may, though nothing calls them a head.

Where no other leaf takes as many features as a kernel gives, its outputs end there: it
writes the output, or they are cut, joined or reshaped before they are taken, compared
with those of another tower, or go where this part of a model does not show. Sizes may
also coincide, so that nothing ends although something writes the output.

What is sure goes to AdamW. What may be so is asked about, but only where it follows
another kernel: one layer alone, such as a part of a model has, is a matrix.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from . import names
from .leaves import Leaf
from .paths import Path
from .stacks import Stack
from .verdict import adamw, Verdict


_COLORS = 4  # at most, with transparency
_WINDOWS = {"bias tells", "convolution"}

_HEAD = adamw("output head: nothing takes its outputs?", "head")
_OF_VOCABULARY = adamw("output head: as large as the vocabulary?", "head")
_MAY_BE_HEAD = adamw("may write the output", "head")._replace(is_known=False)


def outputs_of(
    leaves: Mapping[Path, Leaf],
    verdicts: Mapping[Path, Verdict],
    stacks: Mapping[Path, Stack],
) -> dict[Path, Verdict]:
    """New verdicts on the kernels that write the output, or may, by their own paths."""
    takers: dict[int, set[Path]] = {}
    of_label: dict[str, list[Leaf]] = {}
    for own, verdict in verdicts.items():
        takers.setdefault(_inputs(leaves[own], verdict), set()).add(own)
        of_label.setdefault(verdict.label, []).append(leaves[own])
    takers.pop(0, None)
    attention = {leaf.path[:-2] for leaf in leaves.values() if leaf.module == "query"}
    kernels = [
        leaf
        for leaf in of_label.get("matrix", ())
        if leaf.is_kernel and leaf.path[1:] and verdicts[leaf.own].is_known
        if leaf.shape[-1] > 1  # or its size would tell nothing
        if leaf.path[:-2] not in attention or leaf.module not in names.WITH_HEADS
        if len(leaf.shape) == 2 or verdicts[leaf.own].why in _WINDOWS
    ]
    given = Counter(leaf.shape[-1] for leaf in kernels)
    # Layers of repeated blocks are as many as there are blocks.
    alike = Counter(map(_twin, leaves.values()))
    alone = {
        leaf.own
        for leaf in kernels
        if alike[_twin(leaf)] < 2 and not stacks[leaf.own].depth
    }
    # The layers in each module that have no name but a number.
    chains: dict[Path, list[Leaf]] = {}
    for leaf in sorted(kernels, key=_in_order):
        if names.UNNAMED.fullmatch(leaf.module):
            chains.setdefault(leaf.path[:-2], []).append(leaf)
    found: dict[Path, Verdict] = {}

    def follows(leaf: Leaf) -> bool:
        """Whether another kernel gives what this one takes."""
        features = _features(leaf)
        return given[features] > (features == leaf.shape[-1])

    # As many outputs as there are tokens: the last layer next to the table, or at the
    # root, else those that no layer takes.
    tables = [x for x in of_label.get("embedding", ()) if len(x.shape) == 2]
    if tables and "head" not in of_label:
        turned = {(at, x.shape[::-1]) for x in tables for at in (x.path[:-2], ())}
        last = [x[-1] for at, x in chains.items() if (at, x[-1].shape) in turned]
        sizes = {x.shape[0] for x in tables if x.shape[0] != x.shape[1]}
        sizes -= takers.keys()
        last = last or [x for x in kernels if x.own in alone and x.shape[-1] in sizes]
        found = {x.own: _OF_VOCABULARY for x in last if not stacks[x.own].depth}

    ends = [
        leaf
        for leaf in kernels
        if names.IN_BLOCK.isdisjoint(names.words(leaf.module))
        if not takers.get(leaf.shape[-1], set()) - {leaf.own}
        if leaf.own not in found
    ]
    # Of one size in several places, they are compared with one another.
    places: dict[int, set[Path]] = {}
    for leaf in ends:
        if leaf.own in alone:
            is_unnamed = leaf in chains.get(leaf.path[:-2], ())
            place = leaf.path[: -2 if is_unnamed else -1]
            places.setdefault(leaf.shape[-1], set()).add(place)
    # Features that are taken and of which nothing gives as many are data, or joined, or
    # were in a picture that is flat now; a window's were in features that are none.
    joined = takers.keys() - given
    unfolded = {_features(x) for x in kernels if len(x.shape) > 3} & joined
    n_matrices = sum(x.numbers is not None for x in verdicts.values())
    has_windows = any(len(x.shape) > 3 for x in leaves.values())
    for leaf in ends:
        outputs, is_window = leaf.shape[-1], len(leaf.shape) > 2
        if is_window and outputs > _COLORS and any(n % outputs == 0 for n in joined):
            continue
        # Fused projections, gates and modulations are cut; one at the root may be.
        parts = {outputs // n for n in (2, 3, 4, 6) if outputs % n == 0}
        is_cut = outputs % _features(leaf) == 0 or bool(takers.keys() & parts)
        if is_cut and leaf.path[:-2]:
            continue
        is_cut |= any(outputs % n == 0 for n in unfolded)
        is_last = leaf.bias is not None and leaf.own in alone and not is_window
        is_last &= not is_cut and len(places.get(outputs, ())) == 1
        if is_last and n_matrices > (1 if has_windows else 2):
            found[leaf.own] = _HEAD
        elif follows(leaf):
            found[leaf.own] = _MAY_BE_HEAD

    # Nothing ends and nothing is looked up: sizes coincide.
    is_headless = not found and not tables and "head" not in of_label
    is_headless &= all(x.why != "one output" for x in verdicts.values())
    for at, chain in chains.items() if is_headless else ():
        first, last = chain[0], chain[-1]
        # Layers of one shape are a stack of blocks; two that come back are one block.
        is_block = len({x.shape for x in chain}) == 1 < len(chain)
        is_block |= bool(at) and chain[2:] == [] and first.shape == last.shape[::-1]
        # One layer next to the rest of a model, or a layer after others like it.
        is_last = not is_block and len(chain if at else kernels) > 1
        if is_last and last.own in alone and follows(last):
            found[last.own] = _MAY_BE_HEAD
    for leaf in kernels:
        if not names.OUTPUTS.isdisjoint(names.words(leaf.module)):
            found.setdefault(leaf.own, _MAY_BE_HEAD)
    # Where a mask hides a kernel, nobody knows what it takes: no more is asked.
    if any(x.why == "hidden" for x in verdicts.values()):
        found = {own: x for own, x in found.items() if x.is_known}
    # A head that writes features which another part takes is none: the pictures' of
    # PaliGemma, the texts' of SigLIP.
    for leaf in of_label.get("head", ()):
        if leaf.path[:-2] and leaf.module == "head" and leaf.shape[-1] in takers:
            numbers = leaf.numbers((-2,), (-1,))
            found[leaf.own] = Verdict("matrix", numbers, "may be no head", "", False)
    return found


def _inputs(leaf: Leaf, verdict: Verdict) -> int:
    """How many features a leaf takes; 0 for one that takes none."""
    shape, numbers = leaf.shape, verdict.numbers
    if numbers is not None:
        axes: Any = numbers.reduction_axis
        axes = (axes,) if isinstance(axes, int) else axes
        if len(axes) > (1 if leaf.is_conv else 2):
            # Of a window the channels, unless they may be the colors of a picture.
            channels = _features(leaf)
            is_point = math.prod(shape) == channels * shape[-1]
            return channels if channels > _COLORS or is_point else 0
        return math.prod(shape[leaf.axes.index(i)] for i in axes)
    if shape and names.kind(leaf.path) in ("norm", "embedding"):
        return shape[-1]
    is_layer = verdict.label in ("head", "router") or verdict.why == "one output"
    return _features(leaf) if is_layer and len(shape) > 1 else 0


def _features(leaf: Leaf) -> int:
    """The inputs of a kernel; of a window its channels, which PyTorch has in front."""
    return leaf.shape[0 if leaf.is_turned else -2]


def _twin(leaf: Leaf) -> tuple[Path, tuple[int, ...]]:
    """A key that a leaf shares with the same one of other numbered blocks."""
    modules = (re.sub(r"\d+$", "#", name) for name in leaf.path[:-2])
    return (*modules, *leaf.path[-2:]), leaf.shape


def _in_order(leaf: Leaf) -> list[tuple[bool, int, str]]:
    """`Dense_10` after `Dense_9`, `linear` before `linear_1`, `out` at the end."""
    return [
        (name in ("out", "output"), int(re.sub(r"\D", "", name) or 0), name)
        for name in leaf.path
    ]

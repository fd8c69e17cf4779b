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
from .names import Leaf
from .paths import Path
from .stacks import Stack
from .verdict import Verdict


_COLORS = 4  # at most, with transparency
_WINDOWS = {"bias tells", "convolution"}

_HEAD = Verdict("head", None, "output head: nothing takes its outputs?")
_OF_VOCABULARY = Verdict("head", None, "output head: as large as the vocabulary?")
_MAY_BE_HEAD = Verdict("head", None, "may write the output", is_known=False)


class Outputs:
    """The kernels of a tree, which give features, and the leaves that take them."""

    def __init__(
        self,
        leaves: Mapping[Path, Leaf],
        verdicts: Mapping[Path, Verdict],
        stacks: Mapping[Path, Stack],
    ):
        self.verdicts = verdicts
        self.takers: dict[int, set[Path]] = {}
        of_label: dict[str, list[Leaf]] = {}
        for own, verdict in verdicts.items():
            size = _inputs(leaves[own], verdict)
            self.takers.setdefault(size, set()).add(own)
            of_label.setdefault(verdict.label, []).append(leaves[own])
        self.takers.pop(0, None)
        self.tables = [x for x in of_label.get("embedding", ()) if len(x.shape) == 2]
        self.heads = of_label.get("head", [])
        attention = {x.path[:-2] for x in leaves.values() if x.module == "query"}
        self.kernels = [
            leaf
            for leaf in of_label.get("matrix", ())
            if leaf.is_kernel and leaf.path[1:] and verdicts[leaf.own].is_known
            if leaf.shape[-1] > 1  # or its size would tell nothing
            if leaf.path[:-2] not in attention or leaf.module not in names.WITH_HEADS
            if len(leaf.shape) == 2 or verdicts[leaf.own].why in _WINDOWS
            if isinstance(verdicts[leaf.own].numbers.output_axis, int)
        ]
        self.given = Counter(leaf.shape[-1] for leaf in self.kernels)
        self.has_windows = any(len(x.shape) > 3 for x in leaves.values())
        # Layers of repeated blocks are as many as there are blocks.
        alike = Counter(map(_twin, leaves.values()))
        self.alone = {
            leaf.own
            for leaf in self.kernels
            if alike[_twin(leaf)] < 2 and not stacks[leaf.own].depth
        }
        # The layers in each module that have no name but a number.
        self.chains: dict[Path, list[Leaf]] = {}
        for leaf in sorted(self.kernels, key=_in_order):
            if names.UNNAMED.fullmatch(leaf.module):
                self.chains.setdefault(leaf.path[:-2], []).append(leaf)

    def found(self) -> dict[Path, Verdict]:
        """New verdicts on kernels that write the output, or may, by their own paths."""
        found = self._of_vocabulary()
        found |= self._ends(found)
        is_row = any(x.why == "one output" for x in self.verdicts.values())
        if not (found or self.tables or self.heads or is_row):
            found = self._last_of_chains()
        for leaf in self.kernels:
            if not names.OUTPUTS.isdisjoint(names.words(leaf.module)):
                found.setdefault(leaf.own, _MAY_BE_HEAD)
        # Where a mask hides a kernel, nobody knows what it takes: no more is asked.
        if any(x.why == "hidden" for x in self.verdicts.values()):
            found = {own: x for own, x in found.items() if x.is_known}
        # A head that writes features which another part takes is none: the pictures' of
        # PaliGemma, the texts' of SigLIP.
        for leaf in self.heads:
            is_one = leaf.path[:-2] and leaf.module == "head"
            if is_one and leaf.shape[-1] in self.takers:
                numbers = leaf.numbers((-2,), (-1,))
                found[leaf.own] = Verdict(
                    "matrix", numbers, "may be no head", "", False
                )
        return found

    def _of_vocabulary(self) -> dict[Path, Verdict]:
        """The kernels with as many outputs as there are tokens.

        The last layer next to the table, or at the root, else what no layer takes.
        """
        if self.heads:
            return {}
        turned = {(at, x.shape[::-1]) for x in self.tables for at in (x.path[:-2], ())}
        last = [x[-1] for at, x in self.chains.items() if (at, x[-1].shape) in turned]
        sizes = {x.shape[0] for x in self.tables if x.shape[0] != x.shape[1]}
        sizes -= self.takers.keys()
        alone = [x for x in self.kernels if x.own in self.alone]
        last = last or [x for x in alone if x.shape[-1] in sizes]
        return {x.own: _OF_VOCABULARY for x in last}

    def _ends(self, found: Mapping[Path, Verdict]) -> dict[Path, Verdict]:
        """The kernels of whose outputs nothing takes as many as there are."""
        ends = [
            leaf
            for leaf in self.kernels
            if not _is_in_block(leaf)
            if not self.takers.get(leaf.shape[-1], set()) - {leaf.own}
            if leaf.own not in found
        ]
        # Of one size in several places, they are compared with one another.
        places: dict[int, set[Path]] = {}
        for leaf in ends:
            is_unnamed = leaf in self.chains.get(leaf.path[:-2], ())
            place = leaf.path[: -2 if is_unnamed else -1]
            places.setdefault(leaf.shape[-1], set()).add(place)
        # Features that are taken and of which nothing gives as many are data, or are
        # joined, or of a picture that is flat now.
        joined = self.takers.keys() - self.given
        windows = {_features(x) for x in self.kernels if len(x.shape) > 3} & joined
        n_matrices = sum(x.numbers is not None for x in self.verdicts.values())
        is_deep = n_matrices > (1 if self.has_windows else 2)
        decided = {}
        for leaf in ends:
            outputs, is_window = leaf.shape[-1], len(leaf.shape) > 2
            is_flat = is_window and outputs > _COLORS
            if is_flat and any(n % outputs == 0 for n in joined):
                continue
            # Fused projections, gates and modulations are cut; one at the root may be.
            parts = {outputs // n for n in (2, 3, 4, 6) if outputs % n == 0}
            is_cut = outputs % _features(leaf) == 0 or bool(self.takers.keys() & parts)
            if is_cut and leaf.path[:-2]:
                continue
            # A decoder of pictures unfolds features to what its first window takes.
            is_cut |= any(outputs % n == 0 for n in windows)
            is_sure = leaf.bias is not None and leaf.own in self.alone and is_deep
            is_sure &= not is_cut and not is_window and len(places[outputs]) == 1
            # A gate of few outputs may pick experts, or have one number for each head.
            is_sure &= not {"gate", "gating"} & {*names.words(leaf.module)}
            if is_sure or self._follows(leaf):
                decided[leaf.own] = _HEAD if is_sure else _MAY_BE_HEAD
        return decided

    def _last_of_chains(self) -> dict[Path, Verdict]:
        """The last of unnamed layers, where sizes coincide so that nothing ends."""
        found = {}
        for at, chain in self.chains.items():
            first, last = chain[0], chain[-1]
            # Layers of one shape are a stack of blocks; two that come back are a block.
            is_block = len({x.shape for x in chain}) == 1 < len(chain)
            is_block |= bool(at) and len(chain) == 2 and first.shape == last.shape[::-1]
            # One layer next to the rest of a model, or a layer after others like it.
            is_last = not is_block and len(chain if at else self.kernels) > 1
            if is_last and last.own in self.alone and self._follows(last):
                found[last.own] = _MAY_BE_HEAD
        return found

    def _follows(self, leaf: Leaf) -> bool:
        """Whether another kernel gives what this one takes."""
        features = _features(leaf)
        return self.given[features] > (features == leaf.shape[-1])


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


def _is_in_block(leaf: Leaf) -> bool:
    """Checks for a layer of a block; `in_proj` is one if it widens what it takes."""
    said = names.IN_BLOCK & {*names.words(leaf.module)}
    return bool(said) and (said != {"in"} or leaf.shape[-1] > _features(leaf))


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

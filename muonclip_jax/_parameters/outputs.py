"""Kernels that write the output, or may, though nothing calls them a head.

Where no other leaf takes as many features as a kernel gives, its outputs end there: it
writes the output, or they are cut, joined or reshaped before they are taken, compared
with those of another tower, or go where this part of a model does not show. Sizes also
coincide: a layer whose outputs only the first layers of its own network would take, as
in a coupling flow or an autoencoder, writes what those read, which is data.

What is sure goes to AdamW. What may be so is asked about, but only where it follows
another kernel: one layer alone, such as a part of a model has, is a matrix.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from . import names
from .layers import Leaf, Stack
from .layouts import WITH_HEADS
from .paths import Path
from .verdict import Verdict


_COLORS = 4  # at most, with transparency
_WINDOWS = {"bias shape", "convolution"}

_HEAD = Verdict("head", None, "output head: nothing takes its outputs?")
_OF_VOCABULARY = Verdict("head", None, "output head: as large as the vocabulary?")
_MAY_BE_HEAD = Verdict("head", None, "may write the output", is_known=False)
_MAY_BE_VECTOR = Verdict("vector", None, "may be no layer", is_known=False)


class Outputs:
    """The kernels of a tree, which give features, and the leaves that take them."""

    def __init__(
        self,
        leaves: Mapping[Path, Leaf],
        verdicts: Mapping[Path, Verdict],
        stacks: Mapping[Path, Stack],
    ):
        self.verdicts = verdicts
        self.hides = any(x.why == "hidden" for x in verdicts.values())
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
        self.attention = attention
        self.kernels = [
            leaf
            for leaf in of_label.get("matrix", ())
            if leaf.is_kernel and leaf.path[1:] and verdicts[leaf.own].is_known
            if leaf.path[:-2] not in self.attention or leaf.module not in WITH_HEADS
            if len(leaf.shape) == 2 or verdicts[leaf.own].why in _WINDOWS
            if isinstance(verdicts[leaf.own].numbers.output_axis, int)
        ]
        self.given = Counter(leaf.shape[-1] for leaf in self.kernels)
        # Layers of repeated blocks are as many as there are blocks.
        self.alike = alike = Counter(map(_twin, leaves.values()))
        self.alone = {
            leaf.own
            for leaf in self.kernels
            if alike[_twin(leaf)] < 2 and not stacks[leaf.own].depth
        }
        # The layers of each module, and of others like it; those that have no name but
        # a number, in order.
        self.networks: dict[Any, set[Path]] = {}
        self.sizes: dict[Any, set[tuple[int, ...]]] = {}
        self.chains: dict[Path, list[Leaf]] = {}
        for leaf in sorted(self.kernels, key=_in_order):
            if names.UNNAMED.fullmatch(leaf.module):
                self.chains.setdefault(leaf.path[:-2], []).append(leaf)
            module = _twin(leaf)[0][:-2]
            self.networks.setdefault(module, set()).add(leaf.own)
            self.sizes.setdefault(module, set()).add(leaf.shape[-2:])
        for chain in self.chains.values():
            alike = self.networks.setdefault(tuple(x.shape for x in chain), set())
            alike |= {x.own for x in chain}

    def found(self) -> dict[Path, Verdict]:
        """New verdicts on kernels that write the output, or may, by their own paths."""
        found = self._of_vocabulary()
        found |= self._ends(found)
        for leaf in self.kernels:
            if self._is_called_output(leaf):
                found.setdefault(leaf.own, _MAY_BE_HEAD)
        # Where nothing else writes the output, the last of unnamed layers may; where a
        # table may be tied, only the one at the root.
        is_row = any(x.why == "one output" for x in self.verdicts.values())
        has_head = is_row or bool(self.heads)
        has_head |= any(x.label == "head" for x in found.values())
        for at, chain in self.chains.items():
            first, last = chain[0], chain[-1]
            # Layers of one shape are a stack of blocks; two that come back are a block.
            is_block = len({x.shape for x in chain}) == 1 < len(chain)
            comes_back = len(chain) == 2 and first.shape == last.shape[::-1]
            is_block |= comes_back and bool(at or self.tables)
            is_last = not at or (len(chain) > 1 and not self.tables)
            is_last &= last.own in self.alone and self._follows(last)
            # One point, `(1, 1, in, out)`, ends the windows of a detector's head.
            points = [x for x in chain if {*x.shape[:-2]} == {1}]
            is_last &= not is_block and not has_head
            if is_last or (len(chain) > 2 and points == [last]):
                found.setdefault(last.own, _MAY_BE_HEAD)
        # What numbered modules take is given by others, unless it is no product: a gate
        # or a filter of places, entry by entry, with the features of others.
        for leaf in self.kernels:
            size, module = _features(leaf), self.networks[_twin(leaf)[0][:-2]]
            is_plain = leaf.bias is None and len(leaf.shape) == 2
            is_plain &= 1 < self.alike[_twin(leaf)] < self.given[leaf.shape[-1]]
            is_plain &= not (names.is_layer(leaf.path) or _is_in_block(leaf))
            if is_plain and not self.given[size] and self.takers[size] <= module:
                found.setdefault(leaf.own, _MAY_BE_VECTOR)
        # Nobody knows what a kernel takes that a mask hides.
        if self.hides:
            found = {
                own: _MAY_BE_HEAD if x is _HEAD else x
                for own, x in found.items()
                if x.is_known
            }
        # A head that writes features which another part takes is none: the pictures' of
        # PaliGemma, the texts' of SigLIP.
        for leaf in self.heads:
            is_one = leaf.path[:-2] and leaf.module == "head"
            if is_one and leaf.shape[-1] in self.takers:
                numbers = leaf.numbers((-2,), (-1,))
                doubt = Verdict("matrix", numbers, "may be no head", is_known=False)
                found[leaf.own] = doubt
        return found

    def _of_vocabulary(self) -> dict[Path, Verdict]:
        """The kernels with as many outputs as there are tokens.

        The last layer in the table's module, or at the root, else what no layer takes.
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
            if not _is_in_block(leaf) and leaf.own not in found
            if self._is_end(leaf, self._own_network(leaf))
        ]
        # Of one size in several places, they are compared with one another.
        places = {(x.shape[-1], self._chain(x)[0].own) for x in ends}
        counts = Counter(size for size, _ in places)
        # Features that are taken and of which nothing gives as many are data, or are
        # joined, or of a picture that is flat now.
        joined = self.takers.keys() - self.given
        has_windows = any(len(x.shape) > 3 for x in self.kernels)
        n_matrices = sum(x.numbers is not None for x in self.verdicts.values())
        # Recurrent cells take inputs and their state, and give its gates at once.
        sizes = [(_features(x), x.shape[-1]) for x in self.kernels if len(x.shape) == 2]
        states = {n // k for m, n in sizes for k in (3, 4) if n % k == 0 and m > n // k}
        decided = {}
        for leaf in ends:
            outputs, is_window = leaf.shape[-1], len(leaf.shape) > 2
            is_flat = is_window and outputs > _COLORS
            if is_flat and any(n % outputs == 0 for n in joined):
                continue
            # Fused projections, gates and modulations are cut; one at the root may be.
            parts = {outputs // n for n in (2, 3, 4, 6) if outputs % n == 0}
            is_cut = outputs % _features(leaf) == 0 or bool(self.takers.keys() & parts)
            if is_cut and leaf.path[:-2] and leaf not in self._chain(leaf)[2:][-1:]:
                continue
            # A decoder of pictures unfolds features to what its first window takes.
            is_cut |= has_windows and any(outputs % n == 0 for n in joined)
            is_sure = leaf.bias is not None and leaf.own in self.alone
            is_sure &= n_matrices > (1 if has_windows else 2) and self._is_end(leaf)
            is_sure &= not is_cut and not is_window and counts[outputs] == 1
            is_sure &= not any(self.given[n - outputs] for n in joined - {2 * outputs})
            # A gate of few outputs may pick experts, or have one number for each head.
            is_sure &= not {"gate", "gating"} & {*names.words(leaf.module)}
            is_after_gates = leaf.own in self.alone and _features(leaf) in states
            is_after_gates &= not is_window
            if is_sure or is_after_gates or self._follows(leaf):
                decided[leaf.own] = _HEAD if is_sure else _MAY_BE_HEAD
        return decided

    def _is_end(self, leaf: Leaf, network: Collection[Path] = ()) -> bool:
        """Whether nothing takes its outputs, but the layer itself and its network."""
        takers = self.takers.get(leaf.shape[-1], ())
        return all(own == leaf.own or own in network for own in takers)

    def _own_network(self, leaf: Leaf) -> set[Path]:
        """The kernels of the network that ends in this one, and of those like it.

        Three unnamed layers or more, or a module with layers that lead from the outputs
        of this one to its inputs again; two layers that come back are a block.
        """
        features, outputs, chain = _features(leaf), leaf.shape[-1], self._chain(leaf)
        if chain[1:]:
            key = tuple(x.shape for x in chain)
            is_last = len({*key}) > 1 and leaf in chain[2:][-1:]
            is_last &= (leaf.bias is None) == (chain[0].bias is None)
            pairs = itertools.pairwise(chain)
            is_last = is_last and all(a.shape[-1] == _features(b) for a, b in pairs)
        else:
            key = _twin(leaf)[0][:-2]
            back = {(outputs, features), (features, features)}
            is_last = features != outputs and back <= self.sizes[key]
        return self.networks[key] if is_last else set()

    def _chain(self, leaf: Leaf) -> list[Leaf]:
        """The unnamed layers of its module, if it is one; else a layer by itself."""
        chain = self.chains.get(leaf.path[:-2], [])
        return chain if leaf in chain else [leaf]

    def _is_called_output(self, leaf: Leaf) -> bool:
        said = names.words(leaf.module)
        ends = [*said[:1], *said[-1:]]
        # What says nothing is called what its module is: `final/linear`.
        if names.UNNAMED.fullmatch(leaf.module) and leaf is self._chain(leaf)[-1]:
            ends += names.words("".join(leaf.path[-3:-2]))
        is_end = any(x.startswith(names.ENDS) for x in ends)
        is_end &= leaf.own in self.alone and leaf.path[:-2] not in self.attention
        is_end &= self._follows(leaf)
        return is_end or not names.OUTPUTS.isdisjoint(said)

    def _follows(self, leaf: Leaf) -> bool:
        """Whether another kernel gives what this one takes."""
        features = _features(leaf)
        return self.hides or self.given[features] > (features == leaf.shape[-1])


def _inputs(leaf: Leaf, verdict: Verdict) -> int:
    """How many features a leaf takes; 0 for one that takes none."""
    shape, numbers = leaf.shape, verdict.numbers
    if numbers is not None:
        axes: Any = numbers.reduction_axis
        axes = (axes,) if isinstance(axes, int) else axes
        if len(axes) > (1 if leaf.is_conv else 2):
            # Of a window the channels, unless they may be the colors of a picture.
            is_point = {*shape[:-2]} == {1}
            return _features(leaf) if _features(leaf) > _COLORS or is_point else 0
        # A square by itself may be of pairs of what others give: transitions.
        is_square = not leaf.is_kernel and len({*shape}) == 1
        return 0 if is_square else math.prod(shape[leaf.axes.index(i)] for i in axes)
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


def _in_order(leaf: Leaf) -> list[tuple[int, str]]:
    """`Dense_10` after `Dense_9`, `linear` before `linear_1`."""
    return [(int(re.sub(r"\D", "", name) or 0), name) for name in leaf.path]

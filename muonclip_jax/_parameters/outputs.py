"""Kernels that write the output, or may, though nothing calls them a head.

A kernel ends where no other leaf takes as many features as it gives: it writes the
output, or its features are cut, joined or reshaped before they are taken. Sizes also
coincide: what only the layers of its own network would take, as in a coupling flow, is
as large as the data. A head is sure by the size of the vocabulary, or as the one end
with a bias of a network; all else that may be one is asked about.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from . import names
from .layers import Leaf
from .layouts import WITH_HEADS
from .paths import Path
from .stacks import Stack
from .verdict import Verdict


_COLORS = 4  # at most, with transparency
_WINDOWS = {"bias shape", "convolution"}
_VOCABULARY = Verdict(
    "head", None, "output head: as large as the vocabulary", is_sure=False
)
_HEAD = Verdict("head", None, "output head: nothing takes its outputs", is_sure=False)
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
        labels: dict[str, list[Leaf]] = {}
        for own, verdict in verdicts.items():
            size = _inputs(leaves[own], verdict)
            self.takers.setdefault(size, set()).add(own)
            labels.setdefault(verdict.label, []).append(leaves[own])
        self.takers.pop(0, None)
        self.tables = [x for x in labels.get("embedding", ()) if x.rank == 2]
        self.heads = labels.get("head", [])
        attention = {x.path[:-2] for x in leaves.values() if x.module == "query"}
        self.kernels = sorted(
            (
                x
                for x in leaves.values()
                if x.is_kernel and x.path[1:] and verdicts[x.own].is_known
                if verdicts[x.own].numbers is not None
                if x.path[:-2] not in attention or x.module not in WITH_HEADS
                if x.rank == 2 or verdicts[x.own].kind in _WINDOWS
                if isinstance(verdicts[x.own].numbers.output_axis, int)
            ),
            key=_in_order,
        )
        self.given = Counter(x.shape[-1] for x in self.kernels)
        self.joined = self.takers.keys() - self.given  # or data, or a flat picture
        alike = Counter(map(_twin, leaves.values()))
        self.repeated = {
            own for own, x in leaves.items() if alike[_twin(x)] > 1 or stacks[own].depth
        }
        # The kernels of each module; those that have no name but a number, in order.
        self.modules: dict[Path, list[Leaf]] = {}
        self.chains: dict[Path, list[Leaf]] = {}
        for x in self.kernels:
            self.modules.setdefault(x.path[:-2], []).append(x)
            if names.UNNAMED.fullmatch(x.module):
                self.chains.setdefault(x.path[:-2], []).append(x)

    def found(self) -> dict[Path, Verdict]:
        """New verdicts on kernels that write the output, or may, by their own paths."""
        found = {x.own: _VOCABULARY for x in self._of_vocabulary()}
        ends = [x for x in self.kernels if x.own not in found and self._is_end(x)]
        # Of one size in several places, they are compared with one another.
        places = {(x.shape[-1], self._chain(x)[0].own) for x in ends}
        counts = Counter(size for size, _ in places)
        for x in ends:
            if self._is_sure(x) and counts[x.shape[-1]] == 1:
                found[x.own] = _HEAD
            elif self._follows(x):
                found[x.own] = _MAY_BE_HEAD
        has_head = bool(self.heads or found)
        has_head |= any(x.kind == "one output" for x in self.verdicts.values())
        for x in self.kernels:
            if self._is_called_output(x) or self._is_last(x, has_head):
                found.setdefault(x.own, _MAY_BE_HEAD)
        # Nobody knows what a kernel takes that a mask hides.
        if any(x.source == "hidden" for x in self.verdicts.values()):
            sure = {own: x for own, x in found.items() if x.is_known}
            return sure | {o: _MAY_BE_HEAD for o, x in sure.items() if x is _HEAD}
        # A head that writes features which another part takes is none: the pictures' of
        # PaliGemma, the texts' of SigLIP.
        for x in self.heads:
            if x.path[:-2] and x.module == "head" and x.shape[-1] in self.takers:
                doubt = Verdict("matrix", x.numbers((-2,), (-1,)), "may be no head")
                found[x.own] = doubt._replace(is_known=False)
        return found

    def _of_vocabulary(self) -> list[Leaf]:
        """The kernels with as many outputs as there are tokens.

        The last layer in the table's module, or at the root, else what no layer takes.
        """
        if self.heads:
            return []
        turned = {(at, x.shape[::-1]) for x in self.tables for at in (x.path[:-2], ())}
        last = [x[-1] for at, x in self.chains.items() if (at, x[-1].shape) in turned]
        sizes = {x.shape[0] for x in self.tables if x.shape[0] != x.shape[1]}
        sizes -= self.takers.keys()
        alone = [x for x in self.kernels if x.own not in self.repeated]
        return last or [x for x in alone if x.shape[-1] in sizes]

    def _is_end(self, x: Leaf) -> bool:
        """Whether nothing takes its outputs, but its network or itself."""
        outputs = x.shape[-1]
        is_taken = not self.takers.get(outputs, set()) <= {x.own} | self._network(x)
        if is_taken or _is_in_block(x):
            return False
        # A picture is made flat; fused projections, gates and modulations are cut.
        is_flat = x.rank > 2 and outputs > _COLORS
        if is_flat and any(n % outputs == 0 for n in self.joined):
            return False
        is_free = not x.path[:-2] or (x is self._chain(x)[-1] and self._chain(x)[2:])
        return bool(is_free or not self._is_cut(x))

    def _is_sure(self, x: Leaf) -> bool:
        """Whether an end is the output: the one layer with a bias in its network."""
        outputs, has_windows = x.shape[-1], any(x.rank > 3 for x in self.kernels)
        is_unfolded = has_windows and any(n % outputs == 0 for n in self.joined)
        is_joined = any(self.given[n - outputs] for n in self.joined - {2 * outputs})
        n_matrices = sum(x.numbers is not None for x in self.verdicts.values())
        # A gate of few outputs may pick experts, or have one number for each head.
        is_gate = {"gate", "gating"} & {*names.words(x.module)}
        is_sure = x.bias is not None and x.rank == 2 and x.own not in self.repeated
        is_sure &= self.takers.get(outputs, set()) <= {x.own}
        is_sure &= n_matrices > (1 if has_windows else 2)
        return is_sure and not (is_gate or is_unfolded or is_joined or self._is_cut(x))

    def _is_cut(self, x: Leaf) -> bool:
        outputs = x.shape[-1]
        parts = {outputs // n for n in (2, 3, 4, 6) if outputs % n == 0}
        return outputs % x.features == 0 or bool(self.takers.keys() & parts)

    def _is_called_output(self, x: Leaf) -> bool:
        said = names.words(x.module)
        ends = [*said[:1], *said[-1:]]
        # What says nothing is called what its module is: `final/linear`.
        if names.UNNAMED.fullmatch(x.module) and x is self._chain(x)[-1]:
            ends += names.words("".join(x.path[-3:-2]))
        is_end = any(word.startswith(names.ENDS) for word in ends)
        is_end &= x.own not in self.repeated and self._follows(x) and not x.role
        return is_end or not names.OUTPUTS.isdisjoint(said)

    def _is_last(self, x: Leaf, has_head: bool) -> bool:
        """Whether it is the last unnamed layer: where a table is, only of the root."""
        chain, at = self._chain(x), x.path[:-2]
        shapes = [y.shape for y in chain]
        # One point, `(1, 1, in, out)`, ends the windows of a detector.
        if len(chain) > 2 and [y for y in chain if {*y.shape[:-2]} == {1}] == [x]:
            return x is chain[-1]
        # Layers of one shape are a stack of blocks; two that come back are a block.
        comes_back = len(chain) == 2 and shapes[0] == shapes[1][::-1]
        is_block = len({*shapes}) == 1 < len(chain)
        is_block |= comes_back and bool(at or self.tables)
        is_last = x in self.chains.get(at, [])[-1:] and x.own not in self.repeated
        is_last &= not (has_head or is_block) and self._follows(x)
        return is_last and (not at or (len(chain) > 1 and not self.tables))

    def _network(self, x: Leaf) -> set[Path]:
        """The kernels of its module, and of those like it, if it is the last of three.

        Two layers that come back are a block, and so are layers of one shape.
        """
        chain, inside = self._chain(x), self.modules[x.path[:-2]]
        shapes = [y.shape for y in inside]
        is_last = x is chain[-1] and len(chain) > 2 and len({*shapes}) > 1
        pairs = itertools.pairwise(chain)
        is_last &= all(a.shape[-1] == b.features for a, b in pairs)
        alike = (y for y in self.modules.values() if [z.shape for z in y] == shapes)
        return {z.own for y in alike for z in y} if is_last else set()

    def _chain(self, x: Leaf) -> list[Leaf]:
        """The unnamed layers of its module, if it is one; else a layer by itself."""
        chain = self.chains.get(x.path[:-2], [])
        return chain if x in chain else [x]

    def _follows(self, x: Leaf) -> bool:
        """Whether a kernel gives what this one takes, or the gates of its state."""
        gates = (self.given[n * x.features] for n in (3, 4))
        is_state = x.rank == 2 and x.bias is not None and any(gates)
        return is_state or self.given[x.features] > (x.features == x.shape[-1])


def _inputs(x: Leaf, verdict: Verdict) -> int:
    """How many features a leaf takes; 0 for one that takes none."""
    if verdict.numbers is not None:
        axes: Any = verdict.numbers.reduction_axis
        axes = (axes,) if isinstance(axes, int) else axes
        if len(axes) > (1 if x.is_conv else 2):
            # Of a window the channels, unless they may be the colors of a picture.
            is_point = {*x.shape[:-2]} == {1}
            return x.features if x.features > _COLORS or is_point else 0
        # A square by itself may be of pairs of what others give: transitions.
        is_square = not x.is_kernel and len({*x.shape}) == 1
        return 0 if is_square else math.prod(x.shape[x.axes.index(i)] for i in axes)
    if x.shape and x.kind in ("norm", "embedding"):
        return x.shape[-1]
    is_layer = verdict.label in ("head", "router") or verdict.kind == "one output"
    return x.features if is_layer and x.rank > 1 else 0


def _is_in_block(x: Leaf) -> bool:
    """Checks for a layer of a block; `in_proj` is one if it widens what it takes."""
    said = names.IN_BLOCK & {*names.words(x.module)}
    return bool(said) and (said != {"in"} or x.shape[-1] > x.features)


def _twin(leaf: Leaf) -> tuple[Path, tuple[int, ...]]:
    """A key that a leaf shares with the same one of other numbered blocks."""
    modules = (re.sub(r"\d+$", "#", name) for name in leaf.path[:-2])
    return (*modules, *leaf.path[-2:]), leaf.shape


def _in_order(leaf: Leaf) -> list[tuple[int, str]]:
    """`Dense_10` after `Dense_9`, `linear` before `linear_1`."""
    return [(int(re.sub(r"\D", "", name) or 0), name) for name in leaf.path]

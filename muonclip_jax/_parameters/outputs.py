"""Kernels that write the output, or may, though nothing calls them a head.

A kernel ends where no other leaf takes as many features as it gives: it writes the
output, or its features are cut, joined or reshaped before they are taken. Sizes also
coincide. So what ends is asked about, and what is called an output, and the last of
layers without a name. A head is sure by the size of the vocabulary, or as the one end
of a whole tree, with a bias.
"""

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
_VOCABULARY = Verdict(
    "head", None, "output head: as large as the vocabulary", is_sure=False
)
_HEAD = Verdict("head", None, "output head: nothing takes its outputs", is_sure=False)


class Outputs:
    """The kernels of a tree, which give features, and the leaves that take them."""

    def __init__(
        self,
        leaves: Mapping[Path, Leaf],
        verdicts: Mapping[Path, Verdict],
        stacks: Mapping[Path, Stack],
    ):
        self.takers: dict[int, set[Path]] = {}
        for own, verdict in verdicts.items():
            self.takers.setdefault(_inputs(leaves[own], verdict), set()).add(own)
        self.takers.pop(0, None)
        self.verdicts, in_order = verdicts, sorted(leaves.values(), key=_in_order)
        self.layers = [x for x in in_order if _gives(x, verdicts[x.own])]
        self.kernels = [x for x in self.layers if x.is_kernel and x.path[1:]]
        self.heads = [x for x in in_order if verdicts[x.own].label == "head"]
        self.tables = [x for x in in_order if verdicts[x.own].label == "embedding"]
        rows = [x for x in in_order if verdicts[x.own].kind == "one output"]
        alike = Counter(map(_twin, in_order))
        is_one = {x.own for x in in_order if alike[_twin(x)] == 1}
        self.alone = {own for own in is_one if not stacks[own].depth}
        # The layers of each module that have no name but a number, in order.
        self.chains: dict[Path, list[Leaf]] = {}
        for x in sorted(self.kernels + rows, key=_in_order):
            if names.UNNAMED.fullmatch(x.module):
                self.chains.setdefault(x.path[:-2], []).append(x)
        self.last = {chain[-1].own for chain in self.chains.values()}
        self.given = Counter(x.shape[-1] for x in self.kernels)

    def found(self) -> dict[Path, Verdict]:
        """New verdicts on kernels that write the output, or may, by their own paths."""
        found = {x.own: _VOCABULARY for x in self._of_vocabulary()}
        ends = [x for x in self.kernels if self._ends(x) and x.own not in found]
        ends = [x for x in ends if not self._is_part(x)]
        hides = any(x.source == "hidden" for x in self.verdicts.values())
        if len(ends) == 1 and not (self.heads or found) and self._is_sure(ends[0]):
            found[ends[0].own] = self._asked(ends[0]) if hides else _HEAD
        if hides:  # nobody knows what a kernel takes that a mask hides
            return found
        is_deep = any(self._follows(x) for x in self.kernels)
        is_deep |= len(self.kernels) > 1 and any(x.rank > 3 for x in self.kernels)
        asked = [x for x in ends if is_deep]
        has_head = bool(self.heads or found or asked)
        asked += [x for x in self.kernels if self._is_called_output(x)]
        asked += [x for x in self.kernels if self._may_be_last(x, has_head)]
        found = {x.own: self._asked(x) for x in asked} | found
        # A head that writes features which another part takes is none: the pictures'
        # of PaliGemma, the texts' of SigLIP.
        for x in self.heads:
            if x.path[:-2] and x.module == "head" and x.shape[-1] in self.takers:
                doubt = Verdict("matrix", x.numbers((-2,), (-1,)), "may be no head")
                found[x.own] = doubt._replace(is_known=False)
        return found

    def _asked(self, x: Leaf) -> Verdict:
        """The question. The guess is AdamW for one layer at the root or at an end."""
        is_head = x.own in self.alone and (self._ends(x) or not x.path[:-2])
        numbers = None if is_head else self.verdicts[x.own].numbers
        return Verdict("head", numbers, "may write the output", is_known=False)

    def _of_vocabulary(self) -> list[Leaf]:
        """The kernels with as many outputs as there are tokens.

        The last layer in the table's module, or at the root, else what no layer takes.
        """
        turned = {(at, x.shape[::-1]) for x in self.tables for at in (x.path[:-2], ())}
        sizes = {x.shape[0] for x in self.tables}
        # One array by itself may be anything.
        able = self.layers if len(self.layers) > 1 else self.kernels
        able = [x for x in able if x.own in self.alone and not self.heads]
        last = [x for x in able if x.own in self.last]
        last = [x for x in last if (x.path[:-2], x.shape) in turned]
        return last or [x for x in able if x.shape[-1] in sizes and self._ends(x)]

    def _ends(self, x: Leaf) -> bool:
        return self.takers.get(x.shape[-1], set()) <= {x.own}

    def _follows(self, x: Leaf) -> bool:
        """Whether a kernel gives what this one takes, or the gates of its state."""
        parts = (1, 3, 4) if x.bias is not None and x.rank == 2 else (1,)
        sizes = (n * x.features for n in parts)
        return any(self.given[n] > (n == x.shape[-1]) for n in sizes)

    def _is_part(self, x: Leaf) -> bool:
        """Whether it is of a block, by its name, or others may take it in parts."""
        outputs = x.shape[-1]
        if names.IN_BLOCK & {*names.words(x.module)}:
            return True
        parts = {outputs // n for n in (2, 3, 4, 6) if outputs % n == 0}
        is_fused = outputs % x.features == 0 or bool(self.takers.keys() & parts)
        # A picture is made flat before a layer takes it.
        is_flat = x.rank > 2 and outputs > _COLORS
        is_flat = is_flat and any(n % outputs == 0 for n in self.takers)
        return is_flat or (is_fused and bool(x.path[:-2]))

    def _is_sure(self, x: Leaf) -> bool:
        """Whether the one end is the output of a whole model: a layer with a bias.

        A gate of few outputs may pick experts, or have one number for each head.
        """
        n_matrices = sum(x.numbers is not None for x in self.verdicts.values())
        is_whole = n_matrices > (1 if any(x.rank > 3 for x in self.kernels) else 2)
        is_gate = {"gate", "gating"} & {*names.words(x.module)}
        is_layer = x.bias is not None and x.rank == 2 and x.own in self.alone
        return is_layer and is_whole and not is_gate

    def _is_called_output(self, x: Leaf) -> bool:
        said = names.words(x.module)
        ends = [*said[:1], *said[-1:]]
        # What says nothing is called what its module is: `final/linear`.
        ends += names.words("".join(x.path[-3:-2])) if x.own in self.last else ()
        is_end = any(word.startswith(names.ENDS) for word in ends)
        is_end &= x.own in self.alone and self._follows(x) and not x.role
        return is_end or not names.OUTPUTS.isdisjoint(said)

    def _may_be_last(self, x: Leaf, has_head: bool) -> bool:
        """Whether it is the last of layers without a name, which may write the output.

        Three layers in a module may be a network of their own. Layers of one shape are
        a block, and so are two that come back to where they began.
        """
        module, chain = x.path[:-2], self.chains.get(x.path[:-2], [])
        comes_back = len(chain) == 2 and chain[0].shape == chain[1].shape[::-1]
        is_block = len({y.shape for y in chain}) == 1 < len(chain)
        is_block |= bool(comes_back and module)
        if x.own not in self.last or not self._follows(x) or is_block:
            return False
        if module and x.bias is not None and len(chain) > 2:
            return True
        is_open = x.own in self.alone and not has_head
        return is_open and (not module or (len(chain) > 1 and not self.tables))


def _inputs(x: Leaf, verdict: Verdict) -> int:
    """How many features a leaf takes; 0 for one that takes none."""
    if verdict.numbers is None:
        is_layer = verdict.label in ("head", "router") or verdict.kind == "one output"
        is_vector = bool(x.shape) and x.kind in ("norm", "embedding")
        return x.features if is_layer else x.shape[-1] if is_vector else 0
    axes: Any = verdict.numbers.reduction_axis
    axes = (axes,) if isinstance(axes, int) else axes
    if len(axes) > (1 if x.is_conv else 2):
        # Of a window the channels, unless they may be the colors of a picture.
        is_point = {*x.shape[:-2]} == {1}
        return x.features if x.features > _COLORS or is_point else 0
    # A square by itself may be of pairs of what others give: transitions.
    is_square = not x.is_kernel and len({*x.shape}) == 1
    return 0 if is_square else math.prod(x.shape[x.axes.index(i)] for i in axes)


def _gives(x: Leaf, verdict: Verdict) -> bool:
    """Whether it is a layer whose features another may take as they are."""
    if not (verdict.is_known and (x.is_kernel or x.rank == 2)) or x.role in WITH_HEADS:
        return False
    return verdict.numbers is not None and isinstance(verdict.numbers.output_axis, int)


def _twin(leaf: Leaf) -> tuple[Path, tuple[int, ...]]:
    """A key that a leaf shares with the same one of other numbered blocks."""
    modules = (re.sub(r"\d+$", "#", name) for name in leaf.path[:-2])
    return (*modules, *leaf.path[-2:]), leaf.shape


def _in_order(leaf: Leaf) -> list[tuple[int, str]]:
    """`Dense_10` after `Dense_9`, `linear` before `linear_1`."""
    return [(int(re.sub(r"\D", "", name) or 0), name) for name in leaf.path]

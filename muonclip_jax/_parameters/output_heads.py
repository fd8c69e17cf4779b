"""Which kernels write the output: they go to AdamW, as the embedding does.

A head is called so, or it has the size of the vocabulary, or nothing takes what it
gives: its outputs are the input of no other leaf.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from . import names
from .attention_shapes import PROJECTIONS
from .paths import Path
from .spelled import Spelled
from .stack_axes import Shape


_RECURRENT = {"lstm", "gru", "rnn"}
_LAST = ("out", "output")
_COLORS = 4  # at most, with transparency
_UNNAMED = re.compile(r"(dense|linear)(_\d+)?|out(put)?(_?(layer|dense)(_\d+)?)?", re.I)


def find_heads(leaves: Mapping[Path, Spelled], *, is_whole: bool) -> dict[Path, str]:
    """The paths of the leaves in Flax's words, and what says so.

    What takes the outputs of a leaf can only be seen in a tree that is whole.
    """
    heads = _Heads(leaves)
    found = heads.found() if is_whole else heads.named()
    return {heads.leaves[own].path: why for own, why in found.items()}


class _Heads:
    def __init__(self, leaves: Mapping[Path, Spelled]):
        self.leaves = leaves
        self._biased = {x.path[:-1] for x in leaves.values() if names.is_bias(x.path)}
        self._tables = [x for own, x in leaves.items() if self._is_vocabulary(own, x)]
        self._kernels = {
            own: x
            for own, x in leaves.items()
            if x.path[-1:] == ("kernel",) and len(x.path) > 1 and len(x.shape) == 2
            if not self._is_table(own, x)
        }
        self._blocks = _repeated(leaves)
        self._taken = self._sizes_taken()

    def found(self) -> dict[Path, str]:
        return self._dead_ends() | (self.named() or self._with_vocabulary())

    def named(self) -> dict[Path, str]:
        """Those whose module is called a head."""
        return {
            own: "named so"
            for own, leaf in self._kernels.items()
            if names.is_head(leaf.path[-2])
        }

    def _with_vocabulary(self) -> dict[Path, str]:
        """Those with as many outputs as there are tokens, which no layer takes."""
        hidden = {leaf.shape[0] for leaf in self._kernels.values()}
        sizes = {x.shape[0] for x in self._tables if x.shape[0] != x.shape[1]} - hidden
        found = [
            own
            for own, leaf in self._kernels.items()
            if leaf.shape[1] in sizes and not self._is_in_block(leaf)
        ]
        found = self._last_beside() or found
        return dict.fromkeys(found, "as large as the vocabulary")

    def _last_beside(self) -> list[Path]:
        """The last unnamed kernel beside an embedding, if its shape is that turned.

        An outermost one may have its embedding anywhere.
        """
        last: dict[Path, Path] = {}
        for own, leaf in self._kernels.items():
            if _UNNAMED.fullmatch(leaf.path[-2]):
                parent = leaf.path[:-2]
                last[parent] = max(last.get(parent, own), own, key=_in_order)
        beside: dict[Path, set[Shape]] = {(): {x.shape[::-1] for x in self._tables}}
        for table in self._tables:
            beside.setdefault(table.path[:-2], set()).add(table.shape[::-1])
        return [
            own
            for parent, own in last.items()
            if self._kernels[own].shape in beside.get(parent, ())
        ]

    def _dead_ends(self) -> dict[Path, str]:
        """Those outside of repeated blocks whose outputs nothing takes."""
        attention = {x.path[:-2] for x in self.leaves.values() if _is_key(x.path)}
        found = [
            own
            for own, leaf in self._kernels.items()
            if leaf.shape[1] not in self._taken
            and (
                names.writes_features(leaf.path[-2]) is not False
                or _is_fc(leaf.path)
                or own in self._last_of_runs
            )
            and leaf.path[:-2] not in attention
            and not _is_recurrent(leaf.path)
            and (leaf.shape[1] == 1 or self._may_be_head(leaf))
        ]
        return dict.fromkeys(found, "nothing takes its outputs")

    @functools.cached_property
    def _last_of_runs(self) -> set[Path]:
        """`hidden_2`, where `hidden_0` and `hidden_1` lie beside it."""
        runs: dict[tuple[Path, str], list[Path]] = {}
        for own, leaf in self._kernels.items():
            stem = names.without_number(leaf.path[-2])
            if stem != leaf.path[-2]:
                runs.setdefault((leaf.path[:-2], stem), []).append(own)
        return {max(run, key=_in_order) for run in runs.values() if len(run) > 1}

    def _may_be_head(self, leaf: Spelled) -> bool:
        """Whether it ends a network, and is no fused projection in one."""
        is_parts = leaf.shape[1] % leaf.shape[0] == 0 or self._is_gated(leaf)
        is_fused = is_parts and len(leaf.path) > 2
        is_biased = leaf.path[:-1] in self._biased
        is_whole = len(self._matrices) > (1 if self._has_convolution else 2)
        return is_biased and is_whole and not is_fused and not self._is_in_block(leaf)

    def _is_gated(self, leaf: Spelled) -> bool:
        """Whether it gives values and gates to a layer beside it."""
        features, outputs = leaf.shape
        beside = (x for x in self._kernels.values() if x.path[:-2] == leaf.path[:-2])
        return any((2 * x.shape[0], x.shape[1]) == (outputs, features) for x in beside)

    def _is_in_block(self, leaf: Spelled) -> bool:
        around = (leaf.path[:depth] for depth in range(len(leaf.path) - 1))
        return leaf.is_stacked or any(module in self._blocks for module in around)

    def _is_vocabulary(self, own: Path, leaf: Spelled) -> bool:
        is_table = len(leaf.shape) == 2 and self._is_table(own, leaf)
        return is_table and not names.says_position(own)

    def _is_table(self, own: Path, leaf: Spelled) -> bool:
        """Whether it is an embedding, which has no bias beside it."""
        return names.is_embedding(own) and leaf.path[:-1] not in self._biased

    @functools.cached_property
    def _matrices(self) -> list[Spelled]:
        """All that hold a matrix, arrays under names of their own among them."""
        return [
            leaf
            for own, leaf in self.leaves.items()
            if len(leaf.shape) > 1
            and not names.is_vector(leaf.path)
            and not self._is_table(own, leaf)
        ]

    @functools.cached_property
    def _has_convolution(self) -> bool:
        return any(len(leaf.shape) > 3 for leaf in self._matrices)

    def _sizes_taken(self) -> set[int]:
        """Of inputs, norms and embeddings, but 1: vectors have such axes, too."""
        taken = {size for leaf in self._matrices for size in _inputs(leaf)}
        taken |= {
            leaf.shape[-1]
            for own, leaf in self.leaves.items()
            if leaf.shape and (names.is_norm(leaf.path) or names.is_embedding(own))
            if leaf.path[-1:] != ("kernel",) or leaf.path[:-1] not in self._biased
        }
        return taken - {1}


def _inputs(leaf: Spelled) -> Shape:
    """The sizes that a leaf takes: no windows, and no colors of a picture."""
    if not names.has_word(leaf.path[-2:-1], "conv"):
        return leaf.shape[:-1]
    channels = leaf.shape[0] if leaf.is_turned else leaf.shape[-2]
    is_picture = len(leaf.shape) > 3 and channels <= _COLORS
    return () if is_picture else (channels,)


def _repeated(leaves: Mapping[Path, Spelled]) -> set[Path]:
    """Numbered modules that have a twin: the same leaves of the same shapes."""
    inside: dict[Path, set[tuple[Path, Shape]]] = {}
    for leaf in leaves.values():
        for depth in range(1, len(leaf.path)):
            if leaf.path[depth - 1][-1:].isdigit():
                entry = leaf.path[depth:], leaf.shape
                inside.setdefault(leaf.path[:depth], set()).add(entry)
    twins: dict[Any, list[Path]] = {}
    for module, entries in inside.items():
        name = names.without_number(module[-1])
        twins.setdefault((module[:-1], name, frozenset(entries)), []).append(module)
    return {module for alike in twins.values() if len(alike) > 1 for module in alike}


def _is_key(path: Path) -> bool:
    """Whether it is a projection of attention, in which the value is no head."""
    role = "".join(path[-2:-1])
    return path[-1:] == ("kernel",) and role in PROJECTIONS and role != "value"


def _is_fc(path: Path) -> bool:
    """Whether a module is called as the last of a convolutional network often is."""
    return names.words(path[-2]) == ("fc",)


def _is_recurrent(path: Path) -> bool:
    return any(set(names.words(name)[-1:]) & _RECURRENT for name in path[:-1])


def _in_order(path: Path) -> list[tuple[float, str]]:
    """`Dense_10` behind `Dense_9`, `linear` before `linear_1`, `out` at the end."""
    return [
        (float(digits) if (digits := re.sub(r"\D", "", name)) else _rank(name), name)
        for name in path
    ]


def _rank(name: str) -> float:
    return math.inf if name in _LAST else 0.0

"""Which kernels write the output: they go to AdamW, as the embedding does.

A head is called so, or it has the size of the vocabulary, or nothing takes what it
gives: its outputs are the input of no other leaf.
"""

import re
from collections.abc import Iterable, Mapping

from . import names
from .paths import Path
from .spelled import Spelled


_RECURRENT = ("lstm", "gru", "rnn", "cell")


def find_heads(leaves: Mapping[Path, Spelled]) -> dict[Path, str]:
    """The paths of the leaves in Flax's words, and what says so."""
    leaves = {names.unwrapped(own): leaf for own, leaf in leaves.items()}
    kernels = {
        own: leaf
        for own, leaf in leaves.items()
        if leaf.path[-1:] == ("kernel",) and len(leaf.path) > 1 and len(leaf.shape) > 1
    }
    flat = {own: leaf for own, leaf in kernels.items() if len(leaf.shape) == 2}
    tables = [leaf for own, leaf in leaves.items() if _is_vocabulary(own, leaf)]
    found = _named(flat, {leaf.shape[0] for leaf in tables})
    if not found:
        found = _with_vocabulary(flat, tables)
    last = _dead_ends(flat, kernels, leaves)
    found = {own: "nothing takes its outputs" for own in last} | found
    return {leaves[own].path: why for own, why in found.items()}


def _named(flat: Mapping[Path, Spelled], sizes: set[int]) -> dict[Path, str]:
    """Those whose module is called a head, or that come last in such a module."""
    found = {own: "named so" for own, x in flat.items() if _is_named(x.path[-2:-1])}
    last: dict[Path, Path] = {}
    for own, leaf in flat.items():
        for depth in range(1, len(leaf.path) - 2):
            if _is_named(leaf.path[depth - 1 : depth]):
                module = leaf.path[:depth]
                last[module] = max(last.get(module, own), own, key=_in_order)
    fits = (own for own in last.values() if not sizes or flat[own].shape[1] in sizes)
    return found | dict.fromkeys(fits, "last of a module named so")


def _with_vocabulary(
    flat: Mapping[Path, Spelled], tables: Iterable[Spelled]
) -> dict[Path, str]:
    """Those with as many outputs as there are tokens, which no layer takes as input."""
    tables = [table for table in tables if table.shape[0] != table.shape[1]]
    hidden = {leaf.shape[0] for leaf in flat.values()}
    found = [
        own
        for own, leaf in flat.items()
        if not _is_in_block(leaf.path)
        for table in tables
        if leaf.shape == table.shape[::-1] and table.shape[0] not in hidden
    ]
    return dict.fromkeys(
        _last_beside(flat, tables) or found, "as large as the vocabulary"
    )


def _last_beside(flat: Mapping[Path, Spelled], tables: Iterable[Spelled]) -> list[Path]:
    """The last unnamed kernel beside an embedding, if its shape is that turned."""
    last: dict[Path, Path] = {}
    for own, leaf in flat.items():
        if re.fullmatch(r"(Dense|linear)(_\d+)?|out|output", leaf.path[-2], re.I):
            parent = leaf.path[:-2]
            last[parent] = max(last.get(parent, own), own, key=_in_order)
    beside = {
        table.path[:-2]: table.shape[::-1] for table in tables if len(table.path) > 1
    }
    return [
        own
        for own in last.values()
        if beside.get(flat[own].path[:-2]) == flat[own].shape
    ]


def _dead_ends(
    flat: Mapping[Path, Spelled],
    kernels: Mapping[Path, Spelled],
    leaves: Mapping[Path, Spelled],
) -> list[Path]:
    """Those with a bias, outside of repeated blocks, whose outputs nothing takes."""
    biased = {leaf.path[:-1] for leaf in leaves.values() if names.is_bias(leaf.path)}
    taken = {size for leaf in kernels.values() for size in leaf.shape[:-1]}
    taken |= {
        leaf.shape[-1]
        for leaf in leaves.values()
        if names.is_norm(leaf.path) and leaf.shape
    }
    taken |= {
        leaf.shape[-1]
        for own, leaf in leaves.items()
        if names.is_embedding(own) and leaf.shape
    }
    return [
        own
        for own, leaf in flat.items()
        if leaf.shape[1] not in taken
        and leaf.path[:-1] in biased
        and len(kernels) > 1
        and not _is_in_block(leaf.path)
        and names.projection(leaf.path[-2]) in (None, "value", "out")
        and not names.has_word(leaf.path, *_RECURRENT)
        and _is_last(own, leaf, flat)
    ]


def _is_in_block(path: Path) -> bool:
    """Whether a module around it is one of several, by its number."""
    return any(re.fullmatch(r"(.*_)?\d+", name) for name in path[:-2])


def _is_last(own: Path, leaf: Spelled, flat: Mapping[Path, Spelled]) -> bool:
    """Whether it comes behind all that are called the same but for the number."""
    pattern = _pattern(leaf.path)
    alike = [x for x, other in flat.items() if _pattern(other.path) == pattern]
    return max(alike, key=_in_order) == own


def _is_vocabulary(own: Path, leaf: Spelled) -> bool:
    return (
        len(leaf.shape) == 2
        and names.is_embedding(own)
        and not names.says_position(own)
    )


def _is_named(module: Path) -> bool:
    return bool(module) and names.is_head(module[0])


def _pattern(path: Path) -> Path:
    return tuple(re.sub(r"\d+", "#", name) for name in path)


def _in_order(path: Path) -> list[tuple[int, str]]:
    """`Dense_10` behind `Dense_9`, and a name without a number last."""
    return [
        (int(digits) if (digits := re.sub(r"\D", "", name)) else 1 << 30, name)
        for name in path
    ]

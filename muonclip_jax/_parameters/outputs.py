"""Kernels that write the output, or may, though nothing calls them a head.

A kernel ends where no other leaf takes as many features as it gives. It then writes the
output, or its features are cut, joined or reshaped before they are taken: the user is
asked. A head is sure by the size of the vocabulary, or as the one end of a whole tree,
with a bias. Sizes also coincide, so the last of layers without a name is asked about,
and what is called an output.
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


def outputs_of(
    leaves: Mapping[Path, Leaf],
    verdicts: Mapping[Path, Verdict],
    stacks: Mapping[Path, Stack],
) -> dict[Path, Verdict]:
    """New verdicts on kernels that write the output, or may, by their own paths."""
    in_order = sorted(leaves.values(), key=_in_order)
    takers: dict[int, set[Path]] = {}
    for x in in_order:
        takers.setdefault(_inputs(x, verdicts[x.own]), set()).add(x.own)
    kernels = [x for x in in_order if _gives(x, verdicts[x.own])]
    alike = Counter(map(_twin, in_order))
    alone = {
        x.own for x in in_order if alike[_twin(x)] == 1 and not stacks[x.own].depth
    }
    labels = {label: [] for label in ("head", "embedding")}
    for x in in_order:
        labels.setdefault(verdicts[x.own].label, []).append(x)
    tables, heads = {x.shape[0] for x in labels["embedding"]}, labels["head"]
    chains: dict[Path, list[Leaf]] = {}  # the layers of a module without a name
    for x in kernels:
        if names.UNNAMED.fullmatch(x.module):
            chains.setdefault(x.path[:-2], []).append(x)

    def ends(x: Leaf) -> bool:
        return takers.get(x.shape[-1], set()) <= {x.own}

    def is_last(x: Leaf) -> bool:
        """Whether it ends a chain, not a block, which comes back to where it began."""
        chain = chains.get(x.path[:-2], [x])
        is_block = len({y.shape for y in chain}) == 1 < len(chain)
        comes_back = len(chain) == 2 and chain[0].shape == x.shape[::-1]
        return x == chain[-1] and not is_block and not (comes_back and x.path[2:])

    found: dict[Path, Verdict] = {}

    def say(x: Leaf, kind: str, **about: Any) -> None:
        is_head = x.own in alone and (ends(x) or not x.path[2:])
        numbers = None if about or is_head else verdicts[x.own].numbers
        about = about or {"is_known": False}
        found[x.own] = Verdict("head", numbers, kind, **about)

    # The last layer next to the table, else what no layer takes.
    able = [
        x for x in kernels if x.shape[-1] in tables and x.own in alone and not heads
    ]
    rooms = {y.path[:-2] for y in labels["embedding"]} | {()}
    last = [x for x in able if is_last(x) and x.path[:-2] in rooms and x.is_kernel]
    for x in last or filter(ends, able):
        say(x, "output head: as large as the vocabulary", is_sure=False)
    left = [x for x in kernels if x.own not in found and x.path[1:]]
    open_ends = [x for x in left if ends(x) and not _is_part(x, takers)]
    is_whole = len(kernels) > 2 and not (heads or found)
    hides = any(x.source == "hidden" for x in verdicts.values())
    if len(open_ends) == 1 and is_whole and _is_layer(open_ends[0], alone):
        about = {} if hides else {"is_sure": False}
        said = (
            "may write the output"
            if hides
            else "output head: nothing takes its outputs"
        )
        say(open_ends.pop(), said, **about)
    is_deep = any(takers.get(x.shape[-1], set()) - {x.own} for x in kernels)
    if hides or not is_deep:  # nobody knows what a kernel takes that a mask hides
        return found
    has_head = bool(heads or found or open_ends)
    for x in left:
        said = names.words(x.module)
        is_end = any(y.startswith(names.ENDS) for y in (*said[:1], *said[-1:]))
        is_asked = x in open_ends or not names.OUTPUTS.isdisjoint(said)
        is_asked |= is_end and x.own in alone and not x.role
        if x == chains.get(x.path[:-2], [()])[-1] and is_last(x):
            is_deep = len(chains[x.path[:-2]]) > 2 and x.path[2:] and x.bias is not None
            is_asked |= is_deep or (not has_head and x.own in alone)
        if is_asked and x.own not in found:
            say(x, "may write the output")
    # A head that writes features which another part takes is none: the pictures' of
    # PaliGemma, the texts' of SigLIP.
    for x in heads:
        if x.path[2:] and x.module == "head" and x.shape[-1] in takers:
            numbers = x.numbers((-2,), (-1,))
            found[x.own] = Verdict("matrix", numbers, "may be no head", is_known=False)
    return found


def _is_layer(x: Leaf, alone: set[Path]) -> bool:
    """Whether it may be the head: a layer with a bias. A gate may pick experts."""
    is_gate = {"gate", "gating"} & {*names.words(x.module)}
    return x.bias is not None and x.rank == 2 and x.own in alone and not is_gate


def _is_part(x: Leaf, takers: Mapping[int, set[Path]]) -> bool:
    """Whether it is of a block, by its name, or others may take it in parts."""
    outputs = x.shape[-1]
    parts = {outputs // n for n in (2, 3, 4, 6) if outputs % n == 0}
    is_fused = outputs % x.features == 0 or bool(takers.keys() & parts)
    # A picture is made flat before a layer takes it.
    is_flat = x.rank > 2 and outputs > _COLORS and any(n % outputs == 0 for n in takers)
    is_named = not names.IN_BLOCK.isdisjoint(names.words(x.module))
    return is_named or is_flat or (is_fused and x.path[2:] != ())


def _inputs(x: Leaf, verdict: Verdict) -> int:
    """How many features a leaf takes, without the window; -1 if it takes none."""
    if verdict.numbers is None:
        is_layer = verdict.label in ("head", "router") or verdict.kind == "one output"
        is_vector = bool(x.shape) and x.kind in ("norm", "embedding")
        return x.features if is_layer else x.shape[-1] if is_vector else -1
    axes: Any = verdict.numbers.reduction_axis
    axes = (axes,) if isinstance(axes, int) else axes
    if len(axes) > (1 if x.is_conv else 2):
        return x.features if x.features > _COLORS else -1
    # A square by itself may be of pairs of what others give: transitions.
    is_square = not x.is_kernel and len({*x.shape}) == 1
    return -1 if is_square else math.prod(x.shape[x.axes.index(i)] for i in axes)


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

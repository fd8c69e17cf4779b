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
from collections.abc import Mapping, Sequence
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
_MAY_BE_HEAD = Verdict("head", None, "may write the output", is_known=False)


def outputs_of(
    leaves: Mapping[Path, Leaf],
    verdicts: Mapping[Path, Verdict],
    stacks: Mapping[Path, Stack],
) -> dict[Path, Verdict]:
    """New verdicts on kernels that write the output, or may, by their own paths."""
    takers: dict[int, set[Path]] = {}
    for own, verdict in verdicts.items():
        takers.setdefault(_inputs(leaves[own], verdict), set()).add(own)
    takers.pop(0, None)
    in_order = sorted(leaves.values(), key=_in_order)
    kernels = [x for x in in_order if _gives(x, verdicts[x.own])]
    heads = [x for x in in_order if verdicts[x.own].label == "head"]
    rows = [x for x in in_order if verdicts[x.own].kind == "one output"]
    tables = [x for x in in_order if verdicts[x.own].label == "embedding"]
    alike = Counter(map(_twin, in_order))
    alone = {x.own for x in kernels if alike[_twin(x)] == 1 and not stacks[x.own].depth}
    # The layers of each module that have no name but a number, in order.
    chains: dict[Path, list[Leaf]] = {}
    for x in sorted(kernels + rows, key=_in_order):
        if names.UNNAMED.fullmatch(x.module):
            chains.setdefault(x.path[:-2], []).append(x)
    last = {chain[-1].own for chain in chains.values()}
    ends = {x.own for x in kernels if takers.get(x.shape[-1], set()) <= {x.own}}

    # The last layer next to the table or at the root, else what no layer takes.
    tops, turned = {(), *(x.path[:-2] for x in tables)}, {x.shape[::-1] for x in tables}
    sizes = {x.shape[0] for x in tables}
    able = [x for x in kernels if x.own in alone and not heads]
    found = {
        x.own: _VOCABULARY
        for x in able
        if x.own in last and x.path[:-2] in tops and x.shape in turned
    } or {x.own: _VOCABULARY for x in able if x.own in ends and x.shape[-1] in sizes}
    ends = {x.own for x in kernels if x.own in ends and not _is_part(x, takers)}
    ends -= found.keys()
    n_matrices = sum(x.numbers is not None for x in verdicts.values())
    hides = any(x.source == "hidden" for x in verdicts.values())
    for x in kernels if len(ends) == 1 and not (heads or found) else ():
        is_whole = n_matrices > (1 if any(y.rank > 3 for y in kernels) else 2)
        # A gate of few outputs may pick experts, or have one number for each head.
        is_gate = {"gate", "gating"} & {*names.words(x.module)}
        is_sure = x.own in ends and x.own in alone and x.rank == 2
        if is_sure and x.bias is not None and is_whole and not is_gate:
            found[x.own] = _MAY_BE_HEAD if hides else _HEAD
    if hides:  # nobody knows what a kernel takes that a mask hides
        return found
    given = Counter(x.shape[-1] for x in kernels)
    # A recurrent cell gives the gates of its state, three or four at once.
    follows = {
        x.own
        for x in kernels
        if given[x.features] > (x.features == x.shape[-1])
        or any(given[n * x.features] for n in (3, 4))
    }
    asked = [x for x in kernels if x.own in ends and follows]
    has_head = bool(heads or found or rows or asked)
    for x in kernels:
        said, chain = names.words(x.module), chains.get(x.path[:-2], [])
        is_open = x.own in alone and not (has_head or (tables and x.path[:-2]))
        may_be_last = x.own in last and _may_write(chain, is_open)
        # What says nothing is called what its module is: `final/linear`.
        above = names.words("".join(x.path[-3:-2])) if x.own in last else ()
        said_last = (*said[:1], *said[-1:], *above)
        is_called = any(word.startswith(names.ENDS) for word in said_last)
        is_called &= x.own in alone and not x.role
        may_end = x.own in follows and (may_be_last or is_called)
        asked += [x] if may_end or {*said} & names.OUTPUTS else []
    found |= {x.own: _MAY_BE_HEAD for x in asked if x.own not in found}
    # A head that writes features which another part takes is none: the pictures' of
    # PaliGemma, the texts' of SigLIP.
    for x in heads:
        if x.path[:-2] and x.module == "head" and x.shape[-1] in takers:
            doubt = Verdict("matrix", x.numbers((-2,), (-1,)), "may be no head")
            found[x.own] = doubt._replace(is_known=False)
    return found


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
    """Whether it is a kernel whose features another may take as they are."""
    is_plain = x.rank == 2 or verdict.kind in ("bias shape", "convolution")
    is_plain &= verdict.is_known and verdict.numbers is not None
    is_plain &= x.is_kernel and bool(x.path[1:]) and x.role not in WITH_HEADS
    return is_plain and isinstance(verdict.numbers.output_axis, int)


def _is_part(x: Leaf, takers: Mapping[int, Any]) -> bool:
    """Whether it is a layer of a block, by its name, or a fused one, by its width."""
    outputs, said = x.shape[-1], names.IN_BLOCK & {*names.words(x.module)}
    # `in_proj` is of a block if it widens what it takes.
    if said and (said != {"in"} or outputs > x.features):
        return True
    parts = {outputs // n for n in (2, 3, 4, 6) if outputs % n == 0}
    is_fused = outputs % x.features == 0 or bool(takers.keys() & parts)
    # A picture is made flat before a layer takes it.
    is_flat = x.rank > 2 and outputs > _COLORS and any(n % outputs == 0 for n in takers)
    return is_flat or (is_fused and bool(x.path[:-2]))


def _may_write(chain: Sequence[Leaf], is_open: bool) -> bool:
    """Whether the last of layers without a name may write the output.

    Layers of one shape are a block, and so are two that come back to where they began.
    Three may be a network of their own; one point, `(1, 1, in, out)`, ends windows.
    """
    *_, x = chain
    shapes, module = [y.shape for y in chain], x.path[:-2]
    comes_back = len(chain) == 2 and shapes[0] == shapes[1][::-1]
    if len({*shapes}) == 1 < len(chain) or (comes_back and module):
        return False
    points = [y for y in chain if {*y.shape[:-2]} == {1}]
    is_network = (
        len(chain) > 2 and x.bias is not None and (x.rank == 2 or points == [x])
    )
    return bool(module and is_network) or (is_open and not (module and len(chain) == 1))


def _twin(leaf: Leaf) -> tuple[Path, tuple[int, ...]]:
    """A key that a leaf shares with the same one of other numbered blocks."""
    modules = (re.sub(r"\d+$", "#", name) for name in leaf.path[:-2])
    return (*modules, *leaf.path[-2:]), leaf.shape


def _in_order(leaf: Leaf) -> list[tuple[int, str]]:
    """`Dense_10` after `Dense_9`, `linear` before `linear_1`."""
    return [(int(re.sub(r"\D", "", name) or 0), name) for name in leaf.path]

"""Kernels that write the output, or may, though nothing calls them a head.

A kernel may be the head if no other leaf takes as many inputs as it has outputs: it
writes the output, or its features are cut, joined or reshaped before they are taken.
The user is asked. The size of the vocabulary makes a head sure, and so does being the
one such kernel of a whole tree, with a bias. Sizes also coincide, so the last of layers
without a name is asked about, and a kernel that is called an output.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import names
from .flax_leaves import FlaxLeaf
from .layer_stacks import LayerStack
from .layouts import DENSE, WITH_HEADS
from .paths import Path
from .verdict import Verdict


_COLORS = 4  # at most, with transparency


def outputs_of(
    leaves: Mapping[Path, FlaxLeaf],
    verdicts: Mapping[Path, Verdict],
    stacks: Mapping[Path, LayerStack],
) -> dict[Path, Verdict]:
    """Returns new verdicts on kernels that write the output, or may, by path."""
    in_order = sorted(leaves.values(), key=_in_order)
    taken = {x.tree_path: _inputs(x, verdicts[x.tree_path]) for x in in_order}
    takers = Counter(n for n in taken.values() if n)
    alike = Counter(map(_twin, in_order))
    alone = {
        x for x in in_order if alike[_twin(x)] == 1 and not stacks[x.tree_path].depth
    }
    layers = [x for x in in_order if _gives(x, verdicts[x.tree_path])]
    kernels = [x for x in layers if x.is_kernel and x.path[1:]]
    heads = [x for x in in_order if verdicts[x.tree_path].label == "head"]
    hidden = [x for x in in_order if x.is_hidden]
    has_head = bool(heads) or any(x.kind == "head" and x.is_kernel for x in hidden)
    tables = [x for x in in_order if verdicts[x.tree_path].label == "embedding"]
    tables += [x for x in hidden if x.kind == "embedding"]
    chains: dict[Path, list[FlaxLeaf]] = {}  # the layers of a module without a name
    rows = [x for x in in_order if verdicts[x.tree_path].kind == "one output"]
    for x in sorted(kernels + rows, key=_in_order):
        if names.UNNAMED.fullmatch(x.module):
            chains.setdefault(x.path[:-2], []).append(x)
    # The last layer of each chain, but for blocks: layers of one shape, or two that
    # come back to where they began. True if it is asked about in any case.
    last = {
        chain[-1]: len(chain) > 2 and module != () and chain[-1].bias is not None
        for module, chain in chains.items()
        if len({x.shape for x in chain}) > 1 or (len(chain) == 1 and not module)
        if not (module and len(chain) == 2 and chain[0].shape == chain[1].shape[::-1])
        if not _is_before(chain[-1], hidden)
    }
    untaken = {
        x for x in layers if takers[n := x.shape[-1]] == (taken[x.tree_path] == n)
    }
    # A layer that is a part of a block by its name writes no output, nor does one whose
    # features may be taken in parts.
    candidates = {x for x in untaken.intersection(kernels) if not _is_part(x, takers)}

    # The last layer in the table's module, or at the root, else what no layer takes.
    sizes = {n for x in tables for n in x.shape[:1]}
    modules = {(), *(x.path[:-2] for x in tables)}
    eligible = alone.intersection(layers if len(layers) > 1 else kernels)
    if any(x.is_hidden for x in tables):
        # The size of a hidden table may be any.
        sizes |= {x.shape[-1] for x in eligible}
    eligible = {x for x in eligible if x.shape[-1] in sizes and not has_head}
    writers = {x for x in eligible if x in last and x.path[:-2] in modules}
    writers = dict.fromkeys(writers or eligible & untaken, "as large as the vocabulary")
    matrix_count = sum(x.numbers is not None for x in verdicts.values())
    if len(candidates) == 1 and matrix_count > 2 and not (has_head or writers):
        sure = filter(_may_be_head, candidates & alone)
        writers = dict.fromkeys(sure, "nothing takes its outputs")
    revised = {
        x.tree_path: Verdict("head", None, f"output head: {why}", is_sure=False)
        for x, why in writers.items()
    }
    if hidden:
        # Nobody knows what a hidden kernel takes. So the user is asked about heads that
        # were found, and about the last kernel of the model, or of a module of it.
        doubt = dict(kind="may write the output", is_known=False)
        revised = {tree_path: x._replace(**doubt) for tree_path, x in revised.items()}
        candidates &= alone
        candidates -= {x for x in candidates if x.path[3:] or _is_before(x, hidden)}
    # A head whose features another part takes is none: that of the pictures in
    # PaliGemma, that of the texts in SigLIP.
    for x in heads:
        if x.path[2:] and x.module == "head" and takers[x.shape[-1]]:
            doubt = Verdict("matrix", x.numbers(*DENSE), "may be no head")
            revised[x.tree_path] = doubt._replace(is_known=False)
    givers = Counter(x.shape[-1] for x in kernels)
    followers = {x for x in kernels if _follows(x, givers)}
    if not (followers or revised):  # a part of a model
        return revised
    asked = candidates | writers.keys()
    has_writer = bool(heads or asked or hidden)
    lasts = {chain[-1] for chain in chains.values()}
    lasts, lone = {x for x in lasts if not _is_before(x, hidden)}, alone & followers
    asked |= {x for x in kernels if _is_called_output(x, x in lasts, x in lone)}
    # In a model with a table the last of a module may as well end a stem.
    lone = {x for x in lone if not (has_writer or (tables and x.path[2:]))}
    asked |= {x for x in followers & {*last} if last[x] or x in lone}
    for x in asked - {*writers}:
        is_head = x in alone and (x in untaken or not x.path[2:])
        numbers = None if is_head else verdicts[x.tree_path].numbers
        revised[x.tree_path] = Verdict(
            "head", numbers, "may write the output", is_known=False
        )
    return revised


def _is_before(x: FlaxLeaf, others: Sequence[FlaxLeaf]) -> bool:
    """Whether another layer follows it in a numbered run, and takes its outputs."""

    def run(leaf: FlaxLeaf) -> tuple[Path, str]:
        return leaf.path[:-2], re.sub(r"\d", "", leaf.module)

    layers = (y for y in others if y.kind in ("", "head") and run(x) == run(y))
    return any(_in_order(x) < _in_order(y) for y in layers)


def _follows(x: FlaxLeaf, givers: Mapping[int, int]) -> bool:
    """Whether it takes another kernel's outputs, or a recurrent cell's gates."""
    parts = (1, 3, 4) if x.bias is not None and x.rank == 2 else (1,)
    sizes = (n * x.features for n in parts)
    return any(givers[n] > (n == x.shape[-1]) for n in sizes)


def _may_be_head(x: FlaxLeaf) -> bool:
    """Whether it is a layer with a bias. A gate of few outputs may pick experts."""
    is_gate = {"gate", "gating"} & {*names.words(x.module)}
    return x.bias is not None and x.rank == 2 and not is_gate


def _is_called_output(x: FlaxLeaf, is_last: bool, is_alone: bool) -> bool:
    # A name that says nothing gives way to its module's: `final/linear`.
    module = "".join(x.path[-3:-2] if is_last else x.path[-2:-1])
    words = names.words(module)
    first, last = words[:1], names.without_layers(module)[-1:]
    if "pre" not in first and not names.BEFORE_LAYERS.isdisjoint(last):
        return True
    is_end = any(word.startswith(names.ENDS) for word in (*words[:1], *words[-1:]))
    return not names.OUTPUTS.isdisjoint(words) or (is_end and is_alone and not x.role)


def _is_part(x: FlaxLeaf, takers: Mapping[int, int]) -> bool:
    outputs = x.shape[-1]
    is_fused = outputs % x.features == 0 or any(
        n * m == outputs for n in takers for m in (2, 3, 4, 6)
    )
    # A picture is made flat before a layer takes it.
    is_flat = x.rank > 2 and outputs > _COLORS and any(n % outputs == 0 for n in takers)
    is_named = not names.IN_BLOCK.isdisjoint(names.words(x.module))
    return is_named or is_flat or (is_fused and x.path[2:] != ())


def _inputs(x: FlaxLeaf, verdict: Verdict) -> int | None:
    """Returns how many features a leaf takes; of a window its channels."""
    if verdict.numbers is None:
        is_layer = verdict.label in ("head", "router") or verdict.kind == "one output"
        is_vector = bool(x.shape) and x.kind in ("norm", "embedding")
        return x.features if is_layer else x.shape[-1] if is_vector else None
    axes: Any = verdict.numbers.reduction_axis
    axes = (axes,) if isinstance(axes, int) else axes
    if len(axes) > (1 if x.is_conv else 2):
        is_point = {*x.shape[:-2]} == {1}  # else they may be the colors of a picture
        return x.features if x.features > _COLORS or is_point else None
    return math.prod(x.shape[x.axes.index(i)] for i in axes)


def _gives(x: FlaxLeaf, verdict: Verdict) -> bool:
    """Whether it is a layer whose features another may take as they are."""
    if not (verdict.is_known and (x.is_kernel or x.rank == 2)) or x.role in WITH_HEADS:
        return False
    return verdict.numbers is not None and isinstance(verdict.numbers.output_axis, int)


def _twin(leaf: FlaxLeaf) -> tuple[Path, tuple[int, ...]]:
    """Returns a key that a leaf shares with its twins in other numbered blocks."""
    modules = (re.sub(r"\d+$", "#", name) for name in leaf.path[:-2])
    return (*modules, *leaf.path[-2:]), leaf.shape


def _in_order(leaf: FlaxLeaf) -> list[tuple[int, str]]:
    """Returns a key that sorts `Dense_10` after `Dense_9`, `x_1` after `x`."""
    return [(int(re.sub(r"\D", "", name) or 0), name) for name in leaf.path]

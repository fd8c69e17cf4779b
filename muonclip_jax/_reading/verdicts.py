"""The verdict on each parameter, from its noted uses."""

import re
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from optax.contrib import MuonDimensionNumbers

from .._parameters.paths import Path, Shape
from .._parameters.verdict import Verdict
from .fact import Fact, union
from .uses import Note, Uses


def verdicts(
    uses: Uses,
    outs: Sequence[Fact],
    shapes: Sequence[Shape],
    is_float: Sequence[bool],
    frozen: Set[int],
    choosing: Set[int],
) -> list[Verdict]:
    """Returns one verdict per parameter.

    Parameters in `frozen` receive no gradient. A frozen one that is in `choosing`, too,
    acts by indices and comparisons alone.
    """
    # An axis is also a stack if each of its entries is sliced off for a separate use:
    # `cuts` has a bit for each entry, and all are set.
    sliced_axes = {
        (i, a) for (i, a), bits in uses.cuts.items() if bits + 1 == 1 << shapes[i][a]
    }
    experts = uses.experts | sliced_axes
    # An output head feeds no further weight. A router selects activations, and its
    # selection is used. Kernels with one number for each head scale other outputs, but
    # are not used as features themselves.
    output_heads = union(out.writers for out in outs) & ~uses.fed | uses.last
    routers = uses.chosen & uses.fed
    of_heads = uses.scales - uses.features

    notes: list[list[Note]] = [[] for _ in shapes]
    for note in uses.notes:
        notes[note.parameter].append(note)

    def verdict(i: int, shape: Shape) -> Verdict:
        if not is_float[i]:
            return Verdict("vector", None, "no floats", "read")
        leaf_notes = notes[i]
        first_notes = {note.kind: note for note in reversed(leaf_notes)}
        if not leaf_notes:
            return Verdict("vector", None, "not used", "read", is_known=False)

        def labeled(label: str, noted: str, kind: str = "", **more: Any) -> Verdict:
            about = {"source": "read", "line": first_notes[noted].line, **more}
            return Verdict(label, None, kind or noted, **about)

        if i in frozen:
            words = "its gradient is stopped"
            if i in choosing:
                words = "acts by indices and comparisons alone"
            return labeled("frozen", leaf_notes[0].kind, words)
        if "looked up" in first_notes:
            tied = "looked up, tied" if "contracted" in first_notes else ""
            return labeled("embedding", "looked up", tied)
        weights = [u for u in leaf_notes if u.kind in ("contracted", "factor")]
        if not weights:
            for kind in ("elementwise", "depthwise", "data"):
                if kind in first_notes:
                    return labeled("vector", kind)
            what = f"unknown: {first_notes['unknown'].name}"
            return labeled("vector", "unknown", what, is_known=False)
        inputs, outputs = _axes(weights, shape, {a for j, a in experts if j == i})
        kind = weights[0].kind
        if not inputs or not any(shape[axis] > 1 for axis in outputs):
            return labeled("vector", kind, "one output" if inputs else "elementwise")
        events = union(use.event for use in weights)
        if events & routers:
            return labeled("router", kind, "chooses")
        if events & output_heads:
            return labeled("head", kind, "writes the output")
        if i in of_heads:
            return labeled("vector", kind, "one number for each head")
        sides: Any = ((x if x[1:] else x[0]) for x in (inputs, outputs))
        kind = "contracted" if "contracted" in first_notes else "factor"
        words = "factor of a product" if kind == "factor" else ""
        return labeled("matrix", kind, words)._replace(
            numbers=MuonDimensionNumbers(*sides)
        )

    return [verdict(i, shape) for i, shape in enumerate(shapes)]


#: Labels on which layers of one structure agree. They need not agree on others: the
#: head is the last layer alone, and single layers may be frozen or tied.
_OF_LAYERS = ("matrix", "router", "vector")

_NUMBER = re.compile(r"\d+")


def doubted(
    all_paths: Sequence[Path], shapes: Sequence[Shape], leaf_verdicts: Sequence[Verdict]
) -> list[Verdict]:
    """Returns the verdicts; those that differ from layer to layer alone are unknown.

    The layers of a loop are modules of one structure, whose paths differ in an index,
    and use a leaf at one line. If the verdicts on it differ, one may be wrong, and
    nothing else would show it.
    """
    layers: dict[Any, list[int]] = {}
    rows = zip(all_paths, shapes, leaf_verdicts, strict=True)
    for i, (path, shape, x) in enumerate(rows):
        module = tuple(_NUMBER.sub("*", str(key)) for key in path[:-1])
        if x.label in _OF_LAYERS and x.source == "read" and x.is_known and x.line:
            layers.setdefault((module, path[-1:], shape, x.line), []).append(i)
    changed = [*leaf_verdicts]
    for indices in layers.values():
        labels = list(dict.fromkeys(leaf_verdicts[i].label for i in indices))
        if len({leaf_verdicts[i][:2] for i in indices}) > 1:
            what = " or ".join(labels) if labels[1:] else f"{labels[0]} of other axes"
            kind = f"a {what}, layer by layer, at {leaf_verdicts[indices[0]].line}"
            for i in indices:
                changed[i] = leaf_verdicts[i]._replace(kind=kind, is_known=False)
    return changed


def _axes(
    uses: list[Note], shape: Shape, experts: Set[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the input axes and the output axes; all other axes are a stack."""
    votes: list[Counter[str]] = [Counter() for _ in shape]
    for axis, role in (pair for use in uses for pair in use.roles):
        votes[axis][role] += 1
    # Uses may disagree: a tied kernel is applied both ways. The majority decides. A tie
    # counts as an output, since heads that are joined are outputs first.
    roles = {
        i: "input" if vote["input"] > vote["output"] else "output"
        for i, vote in enumerate(votes)
        if shape[i] > 1 and (vote["input"] or vote["output"])
    }
    # No axis has a majority of inputs, as in a tied autoencoder, whose weight is
    # applied both ways: the first use decides which side is the input.
    if "input" not in roles.values() and any(vote["input"] for vote in votes):
        sides = ("input", "output")
        roles = {i: x for i, x in uses[0].roles if x in sides and shape[i] > 1}
    ranks = [i for i, vote in enumerate(votes) if vote["rank"] and i not in roles]
    if ranks and not roles:
        for i, vote in enumerate(votes):
            if vote["input?"] or vote["output?"]:
                roles[i] = "input" if vote["input?"] else "output"
    # An axis that is summed over with another parameter is the side that the matrix
    # lacks; a factor between two others has two such axes. If no side is missing, the
    # axis is a stack whose sum is the matrix.
    if not {"input", "output"} <= {*roles.values()}:
        missing = "output" if "input" in roles.values() else "input"
        # Heads and their features in one axis are an output that is also summed over.
        ranks = ranks or [i for i, vote in enumerate(votes) if vote["rank"]]
        free_ranks = [i for i in ranks if i not in roles]
        roles |= dict.fromkeys(
            free_ranks or (ranks if len(ranks) < len(roles) else []), missing
        )
    inputs, outputs = (
        tuple(sorted(i for i in roles if roles[i] == side))
        for side in ("input", "output")
    )
    # Keep at least one axis as an output.
    outputs = tuple(i for i in outputs if i not in experts) or outputs
    if not inputs:  # an axis with one input has no marks, but is still an input
        inputs = tuple(i for i, n in enumerate(shape) if n == 1 and not votes[i])[:1]
    return inputs, outputs

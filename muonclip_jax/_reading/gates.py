"""Kernels whose outputs are one number for each head: gates, steps and decays.

Qwen trains them by AdamW. The trace shows them where they first meet the outputs of
other kernels: they are multiplied with them, along fewer dimensions: one number for
all features of a head. What GLU, adaLN and squeeze-and-excitation multiply has as many
dimensions as what it is multiplied with, and of a key and a value in an outer product
neither has those of the other.
"""

from collections.abc import Iterable

from .values import Factor, Value
from .walk import Walk


def _dims(factors: Iterable[Factor]) -> list[int]:
    """The dimensions that tell a kernel's outputs apart, in its own order."""
    digits = {
        (d.axis, -d.stride, d.dim)
        for f in factors
        for p in f.pieces
        for d in p.digits
        if d.axis is not None and d.dim is not None
        if d.dim >= 0 and d.size > 1
    }
    return list(dict.fromkeys(dim for *_, dim in sorted(digits)))


def _of_kernels(walk: Walk, value: Value) -> dict[int, list[int]]:
    """What `_dims` says of every kernel whose outputs an array has."""
    found: dict[int, list[Factor]] = {}
    for f in value.factors():
        if f.source.number in walk.kernels:
            found.setdefault(f.source.number, []).append(f)
    return {kernel: _dims(own) for kernel, own in found.items()}


def met(walk: Walk, value: Value, other: Value) -> None:
    """Notes what outputs are that are multiplied with others for the first time."""
    kernel = value.sole
    if kernel is None or kernel < 0 or other.sole in (None, kernel):
        return
    own = {*_of_kernels(walk, value).get(kernel, ())}
    others = _of_kernels(walk, other)
    theirs = [dims for i, dims in others.items() if i != kernel and dims]
    if own and theirs:
        # Heads come before their features in every kernel.
        is_scale = all(own < {*dims} and own == {*dims[: len(own)]} for dims in theirs)
        walk.note("scales" if is_scale else "features", kernel)


def features(walk: Walk, *values: Value, dims: set[int] | None = None) -> None:
    """Notes that outputs are features: here they are added, or summed over."""
    soles = {v.sole for v in values} - {None}
    for value in values:
        kernel = value.sole
        if kernel is None or kernel < 0 or (len(values) > 1 and len(soles) < 2):
            continue
        if dims is None or dims & {*_of_kernels(walk, value).get(kernel, ())}:
            walk.note("features", kernel)


def of_heads(walk: Walk) -> set[int]:
    """The kernels all of whose outputs scale heads."""

    def noted(kind: str) -> set[int]:
        return {note.number for note in walk.notes if note.kind == kind}

    return noted("scales") - noted("features")

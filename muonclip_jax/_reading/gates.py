"""Kernels whose outputs are one number for each head: gates, steps and decays.

Qwen trains them by AdamW. The trace shows them where they first meet the outputs of
other kernels: they are multiplied with them, along fewer dimensions: one number for
all features of a head. What GLU, adaLN and squeeze-and-excitation multiply has as many
dimensions as what it is multiplied with, and of a key and a value in an outer product
neither has those of the other.
"""

from .values import Value
from .walk import Walk


def _dims(walk: Walk, value: Value) -> dict[int, list[int]]:
    """The dimensions that tell the outputs of each kernel apart, in its own order."""
    found: dict[int, set[tuple[int, int, int]]] = {}
    for f in value.factors():
        if f.number in walk.kernels:
            own = {(d.axis, -d.stride, d.dim) for d in f.seen if d.size > 1}
            found.setdefault(f.number, set()).update(own)  # type: ignore
    return {i: list(dict.fromkeys(x[-1] for x in sorted(found[i]))) for i in found}


def met(walk: Walk, a: Value, b: Value) -> None:
    """Notes what outputs are that are multiplied with others for the first time."""
    for kernel, value, other in ((a.sole, a, b), (b.sole, b, a)):
        if kernel in (None, -1) or other.sole in (None, kernel):
            continue
        own = _dims(walk, value).get(kernel, [])
        others = _dims(walk, other)
        theirs = [dims for i, dims in others.items() if i != kernel and dims]
        if own and theirs:
            # Heads come before their features in every kernel.
            is_scale = all(
                len(own) < len(dims) and {*own} == {*dims[: len(own)]}
                for dims in theirs
            )
            walk.note("scales" if is_scale else "features", kernel)


def features(walk: Walk, *values: Value, dims: set[int] | None = None) -> None:
    """Notes that outputs are features: here they are added, or summed over."""
    soles = {v.sole for v in values} - {None}
    for value in values if len(values) == 1 or len(soles) > 1 else ():
        if value.sole not in (None, -1) and (
            dims is None or dims & {*_dims(walk, value).get(value.sole, ())}
        ):
            walk.note("features", value.sole)


def of_heads(walk: Walk) -> set[int]:
    """The kernels all of whose outputs scale heads."""
    return walk.numbers_of("scales") - walk.numbers_of("features")

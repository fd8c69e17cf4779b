"""What each parameter is, by the uses that a walk noted."""

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from optax.contrib import MuonDimensionNumbers

from . import gates, jaxprs
from .pieces import Shape
from .values import Value
from .walk import Note, Walk


class Verdict(NamedTuple):
    """What one parameter is."""

    label: str  # "matrix", "embedding", "head", "router" or "vector"
    numbers: MuonDimensionNumbers | None  # of a matrix
    use: str  # in words, what is done with it
    line: str  # file and line where
    is_known: bool = True  # False if nothing uses it, or what cannot be read


def verdicts(
    walk: Walk,
    outs: Sequence[Value],
    is_float: Sequence[bool],
    heads_at: Set[tuple[int, int]],
) -> list[Verdict]:
    """One for each parameter; heads of attention are along the axes `heads_at`."""
    uses: list[list[Note]] = [[] for _ in walk.shapes]
    experts, fed, chosen, ends = set(), 0, 0, 0
    cut: dict[tuple[int, int], int] = {}
    for note in walk.notes:
        if note.kind == "expert":
            experts.add((note.number, note.roles[0][0]))
        elif note.kind == "cut":
            at = note.number, note.roles[0][0]
            cut[at] = cut.get(at, 0) | note.events
        elif note.kind == "fed":
            fed |= note.events
        elif note.kind == "chosen":
            chosen |= note.events
        elif note.kind not in ("weighed", "hidden", "scales", "features"):
            uses[note.number].append(note)
    for out in outs:
        ends |= out.ends
        gates.features(walk, out)
    # An axis all of whose entries go their own way is a stack, too.
    for (i, axis), entries in cut.items():
        if entries == (1 << walk.shapes[i][axis]) - 1:
            experts.add((i, axis))
    # What another product with a parameter is applied to is no output; what decides
    # where activations go is no router unless something comes of it. Heads are cut
    # apart as experts are, but of one matrix.
    of_heads = gates.of_heads(walk)
    heads, routers, experts = ends & ~fed, chosen & fed, experts - heads_at
    return [
        _verdict(
            uses[i],
            shape,
            heads,
            routers,
            {a for j, a in experts if j == i},
            i in of_heads,
        )
        if is_float[i]
        else Verdict("vector", None, "no floats", "")
        for i, shape in enumerate(walk.shapes)
    ]


def _verdict(
    uses: list[Note],
    shape: Shape,
    heads: int,
    routers: int,
    experts: Set[int],
    of_heads: bool,
) -> Verdict:
    if not uses:
        return Verdict("vector", None, "not used", "", is_known=False)
    of: dict[str, Note] = {}
    for use in uses:
        of.setdefault(use.kind, use)

    def said(label: str, kind: str, words: str = "", **more: Any) -> Verdict:
        return Verdict(label, None, words or kind, jaxprs.line(of[kind].eqns), **more)

    if "looked up" in of:
        is_tied = "contracted" in of
        return said("embedding", "looked up", "looked up, tied" if is_tied else "")
    weights = [u for u in uses if u.kind in ("contracted", "factor")]
    if not weights:
        for kind in ("elementwise", "depthwise"):
            if kind in of:
                return said("vector", kind)
        what = f"unknown: {of['unknown'].eqns[-1].primitive.name}"
        return said("vector", "unknown", what, is_known=False)
    inputs, outputs = _axes(weights, shape, experts)
    kind = weights[0].kind
    if not inputs or not any(shape[axis] > 1 for axis in outputs):
        return said("vector", kind, "one output" if inputs else "elementwise")
    events = 0
    for use in weights:
        events |= use.events
    if events & routers:
        return said("router", kind, "chooses")
    if events & heads:
        return said("head", kind, "writes the output")
    if of_heads:
        return said("vector", kind, "one number for each head")
    numbers = MuonDimensionNumbers(_as_axes(inputs), _as_axes(outputs))
    used = next((u for u in weights if u.kind == "contracted"), weights[0])
    words = "contracted" if "contracted" in of else "factor of a product"
    return Verdict("matrix", numbers, words, jaxprs.line(used.eqns))


def _axes(
    uses: list[Note], shape: Shape, experts: Set[int]
) -> tuple[list[int], list[int]]:
    """The axes that are inputs, and those that are outputs; all others are a stack."""
    votes: list[Counter[str]] = [Counter() for _ in shape]
    for use in uses:
        for axis, role in use.roles:
            votes[axis][role] += 1
    # Uses may disagree: a tied kernel is applied both ways. Most decide, and outputs
    # where as many say so, since heads that are joined are outputs first.
    roles: list[str | None] = []
    for n, vote in zip(shape, votes, strict=True):
        sides = vote["input"], vote["output"]
        role = None
        if n > 1 and any(sides):
            role = "input" if sides[0] > sides[1] else "output"
        roles.append(role)
    ranks = [i for i, vote in enumerate(votes) if vote["rank"] and not roles[i]]
    if ranks:
        # Summed over with another parameter: the side of the matrix that is missing.
        if not set(roles) & {"input", "output"}:
            for i, vote in enumerate(votes):
                if vote["input?"] or vote["output?"]:
                    roles[i] = "input" if vote["input?"] else "output"
        missing = "output" if "input" in roles else "input"
        for i in ranks:
            roles[i] = missing
    inputs = [i for i, role in enumerate(roles) if role == "input"]
    outputs = [i for i, role in enumerate(roles) if role == "output"]
    # Of more than one axis, or there would be no output left.
    outputs = [i for i in outputs if i not in experts] or outputs
    if not inputs:  # a number of inputs that is one has no digits, but it is there
        inputs = [i for i, n in enumerate(shape) if n == 1 and not votes[i]][:1]
    return inputs, outputs


def _as_axes(axes: list[int]) -> int | tuple[int, ...]:
    return axes[0] if len(axes) == 1 else tuple(axes)

"""The verdict on each parameter, by the uses that were noted."""

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from optax.contrib import MuonDimensionNumbers

from .._parameters.verdict import Verdict
from .facts import Fact, union
from .uses import Note, Uses


Shape = tuple[int, ...]


def verdicts(
    uses: Uses,
    outs: Sequence[Fact],
    shapes: Sequence[Shape],
    is_float: Sequence[bool],
    frozen: Set[int],
) -> list[Verdict]:
    """One for each parameter; no gradient reaches those that are `frozen`."""
    # An axis all of whose entries go their own way is a stack, too.
    own_ways = {
        (i, a) for (i, a), of in uses.cuts.items() if of + 1 == 1 << shapes[i][a]
    }
    experts = uses.experts | own_ways
    # What another product with a parameter is applied to is no output; what decides
    # where activations go is no router unless something comes of it. Heads are cut
    # apart as experts are, but of one matrix.
    heads = union(out.ends for out in outs) & ~uses.fed
    routers = uses.chosen & uses.fed
    of_heads = uses.scales - uses.features

    def verdict(i: int, shape: Shape) -> Verdict:
        if not is_float[i]:
            return Verdict("vector", None, "no floats", "read")
        own = [note for note in uses.notes if note.number == i]
        of = {note.kind: note for note in reversed(own)}  # the first of each kind
        if not own:
            return Verdict("vector", None, "not used", "read", is_known=False)

        def said(label: str, kind: str, words: str = "", **more: Any) -> Verdict:
            about = {"source": "read", "line": of[kind].line, **more}
            return Verdict(label, None, words or kind, **about)

        if i in frozen:
            return said("frozen", own[0].kind, "its gradient is stopped")
        if "looked up" in of:
            tied = "looked up, tied" if "contracted" in of else ""
            return said("embedding", "looked up", tied)
        weights = [u for u in own if u.kind in ("contracted", "factor")]
        if not weights:
            for kind in ("elementwise", "depthwise", "data"):
                if kind in of:
                    return said("vector", kind)
            what = f"unknown: {of['unknown'].name}"
            return said("vector", "unknown", what, is_known=False)
        inputs, outputs = _axes(weights, shape, {a for j, a in experts if j == i})
        kind = weights[0].kind
        if not inputs or not any(shape[axis] > 1 for axis in outputs):
            return said("vector", kind, "one output" if inputs else "elementwise")
        events = union(use.event for use in weights)
        if events & routers:
            return said("router", kind, "chooses")
        if events & heads:
            return said("head", kind, "writes the output")
        if i in of_heads:
            return said("vector", kind, "one number for each head")
        sides: Any = ((x if x[1:] else x[0]) for x in (inputs, outputs))
        kind = "contracted" if "contracted" in of else "factor"
        words = "factor of a product" if kind == "factor" else ""
        return said("matrix", kind, words)._replace(
            numbers=MuonDimensionNumbers(*sides)
        )

    return [verdict(i, shape) for i, shape in enumerate(shapes)]


def _axes(
    uses: list[Note], shape: Shape, experts: Set[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that are inputs, and those that are outputs; all others are a stack."""
    votes: list[Counter[str]] = [Counter() for _ in shape]
    for axis, role in (pair for use in uses for pair in use.roles):
        votes[axis][role] += 1
    # Uses may disagree: a tied kernel is applied both ways. Most decide, and outputs
    # where as many say so, since heads that are joined are outputs first.
    roles = {
        i: "input" if vote["input"] > vote["output"] else "output"
        for i, vote in enumerate(votes)
        if shape[i] > 1 and (vote["input"] or vote["output"])
    }
    # Applied both ways as often, as the weight of a tied autoencoder is: the first use
    # says which side is the input.
    if "input" not in roles.values() and any(vote["input"] for vote in votes):
        sides = ("input", "output")
        roles = {i: x for i, x in uses[0].roles if x in sides and shape[i] > 1}
    ranks = [i for i, vote in enumerate(votes) if vote["rank"] and i not in roles]
    if ranks and not roles:
        for i, vote in enumerate(votes):
            if vote["input?"] or vote["output?"]:
                roles[i] = "input" if vote["input?"] else "output"
    # Summed over with another parameter: the side of the matrix that is missing. One
    # between two others is summed over on both sides. Where no side is missing, it is
    # a stack of which a sum is the matrix.
    if not {"input", "output"} <= {*roles.values()}:
        missing = "output" if "input" in roles.values() else "input"
        # Heads and their features in one axis are an output, and summed over.
        ranks = ranks or [i for i, vote in enumerate(votes) if vote["rank"]]
        own = [i for i in ranks if i not in roles]
        roles |= dict.fromkeys(
            own or (ranks if len(ranks) < len(roles) else []), missing
        )
    inputs, outputs = (
        tuple(sorted(i for i in roles if roles[i] == side))
        for side in ("input", "output")
    )
    # Of more than one axis, or there would be no output left.
    outputs = tuple(i for i in outputs if i not in experts) or outputs
    if not inputs:  # a number of inputs that is one has no digits, but it is there
        inputs = tuple(i for i, n in enumerate(shape) if n == 1 and not votes[i])[:1]
    return inputs, outputs

"""Splits matrices into one per attention head, as the attention layers say."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._matrices.axes import Axes, MatrixAxes
from .._matrices.stacks import matrix_view
from .._parameters import paths
from .._parameters.verdict import Verdict
from .owned_leaf import OwnedLeaf


def split_heads(
    tree: paths.PathedTree,
    verdicts: Sequence[Verdict],
    described: Mapping[paths.Path, Sequence[tuple[bool, OwnedLeaf]]],
    named: Mapping[paths.Path, Verdict],
    must: bool,
) -> list[Verdict]:
    """Returns the verdicts with a matrix for each head of the leaves that have heads.

    Axes that the user has given are kept, unless they `must` be split. `described` has
    what attention layers say of a leaf, each with whether it is their key. A reading
    finds heads through the logits, so it does not know the value's: those are `named`.
    """
    split = [*verdicts]
    for i, (path, leaf, verdict) in enumerate(tree.rows(verdicts)):
        given = verdict.numbers
        # A bias goes to AdamW, whatever its heads. A matrix that the user has split
        # stays.
        if given is None or isinstance(given, MatrixAxes):
            continue
        if verdict.source == "given" and not must:
            continue
        if described.get(path):
            shape = tuple(leaf.shape)
            axes: Any = _of_heads(path, shape, given, described[path], must)
            # The description of the heads decides what names leave open.
            kind = verdict.kind if verdict.is_known else "heads"
            split[i] = verdict._replace(numbers=axes, kind=kind, is_known=True)
        elif path in named and _cuts(named[path], given, tuple(leaf.shape)):
            split[i] = verdict._replace(numbers=named[path].numbers)
    return split


def _cuts(named: Verdict, given: Axes, shape: tuple[int, ...]) -> bool:
    """Whether a kernel's name shows an axis of heads among its outputs."""
    if named.numbers is None or named.kind != "attention":
        return False
    view, by_name = (matrix_view(shape, x) for x in (given, named.numbers))
    is_same_input = {*view.reduction} == {*by_name.reduction}
    return is_same_input and {*by_name.output} < {*view.output}


def _of_heads(
    path: paths.Path,
    shape: tuple[int, ...],
    given: Axes,
    leaves: Sequence[tuple[bool, OwnedLeaf]],
    must: bool,
) -> Axes:
    """Returns the axes of a leaf, with the outputs of each head as a matrix."""
    (_, leaf), *_ = leaves
    if all(x.head_ids.size == 1 for _, x in leaves):
        return given  # all heads share the leaf
    reduction, output = given.reduction_axis, given.output_axis
    axes = [i for i in range(len(shape)) if i not in leaf.stack]
    owned_along = dict(zip(axes, map(leaf.along, range(len(axes))), strict=True))
    cut = {i for i in axes if leaf.mask.shape[i] > 1 and owned_along[i][1] == 1}
    heads = {i for i in axes if owned_along[i][1] > 1}
    if len(axes) > 2 and all(owned_along[i][0] == owned_along[i][1] for i in heads):
        # Heads have axes of their own, which become a stack. The axis of key and value
        # in Gemma's joint kernel is a stack, too. An axis with one head is not found.
        rest = [i for i in axes if i not in heads and shape[i] > 1]
        if len(rest) == 3 and len(cut) == 1:
            rest.remove(*cut)
        if len(rest) == 2:
            # Inputs come first but where a reading saw that they come last.
            view = matrix_view(shape, given)
            is_last = rest[0] in view.output and rest[1] in view.reduction
            reduction, output = reversed(rest) if is_last else rest
            if not cut & {*rest}:
                return type(given)(reduction, output)
            # The leaf owns a part of each head's outputs, such as a latent key.
            output = tuple(sorted((*heads, output)))
    view = matrix_view(shape, MatrixAxes(reduction, output))
    # The head of each output, even numbers for queries and odd ones for keys, of which
    # there may be fewer. Outputs that no head scales, such as the value in a fused
    # kernel, form a matrix of their own from one head to the next.
    alone = tuple(n if i in view.output else 1 for i, n in enumerate(shape))
    inputs = tuple(i for i in range(len(shape)) if i not in view.output)
    owner = np.full(alone, -1)
    for is_key, each in leaves:
        ids = np.expand_dims(each.head_ids, each.stack).max(inputs, keepdims=True)
        owner = np.where(ids < 0, owner, 2 * ids + is_key)
    head_ids = np.broadcast_to(owner, alone).ravel().tolist()
    runs = [(key, len(list(run))) for key, run in itertools.groupby(head_ids)]
    owners = [key for key, _ in runs if key >= 0]
    if len(set(owners)) < len(owners):
        if not must:
            return given
        raise ValueError(
            f"per_head=True cannot cut '{paths.show(path)}' {shape}: the outputs of a "
            "head are not consecutive. Leave its layer out of attention=, or give the "
            "leaf mc.MatrixAxes in dimension_numbers"
        )
    return MatrixAxes(reduction, output, parts=tuple(size for _, size in runs))

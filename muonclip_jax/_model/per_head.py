"""One matrix per attention head, wherever the attention layers say that heads are."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._matrices.axes import Axes, MatrixAxes
from .._matrices.stacks import matrix_view
from .._options import flag
from .._parameters import paths
from .._parameters.dimension_numbers import (
    DimensionNumbers,
    GIVEN,
    OfTree,
    resolve_verdicts,
)
from .._parameters.given import check_model, Model
from .._parameters.verdict import Verdict
from .attention_layers import Attention, resolve_attention
from .head_leaf import HeadLeaf


def heads_apart(
    per_head: bool | None,
    model: Model | None,
    dimension_numbers: DimensionNumbers | None,
    attention: Attention | None = None,
) -> dict[str, Any]:
    """`dimension_numbers` and `per_head` for Muon's leaves, of what the user gave.

    Heads are those of `attention`, else of `model`. Without either, `per_head` stays:
    names tell which axes are heads in stock layers. `None` cuts what can be cut.
    """
    # What was made before, as by `muonclip` for `muon`, is all there is.
    if isinstance(dimension_numbers, OfTree):
        return dict(dimension_numbers=dimension_numbers, per_head=False)
    check_model(model)
    layers = attention
    if attention is None and model is not None:
        # Layers that QK-Clip cannot act on have heads all the same.
        layers = list(model.attention)
    per_head = per_head if per_head is None else flag("per_head", per_head)
    is_cut = per_head is not False and layers is not None
    if model is None and not is_cut:
        return dict(dimension_numbers=dimension_numbers, per_head=per_head)
    must = bool(per_head)
    arguments = (layers if is_cut else (), model, dimension_numbers, must)
    return dict(dimension_numbers=OfTree(_verdicts, arguments), per_head=False)


def _verdicts(
    attention: Attention | None,
    model: Model | None,
    dimension_numbers: DimensionNumbers | None,
    must: bool,
    tree: paths.PathedTree,
) -> list[Verdict]:
    """The verdict on each leaf, with heads as matrices.

    As in Kimi K3 (arXiv:2607.24653, section 2.5) and GLM-5 (arXiv:2602.15763).
    """
    leaf_at = tree.by_path()
    described: dict[paths.Path, list[tuple[bool, HeadLeaf]]] = {}
    for layer in resolve_attention(attention, tree):
        for leaf in layer.leaves:
            # The parts of a query with a rotary embedding and without are one head.
            entry = leaf in layer.key, leaf
            described.setdefault(layer.path_of(leaf), []).append(entry)
    found = resolve_verdicts(dimension_numbers, tree, model=model, described=described)
    for i, (path, verdict) in enumerate(zip(tree.paths, found, strict=True)):
        given = verdict.numbers
        # A bias goes to AdamW, whatever heads it has; what the user has cut stays, and
        # what the user has given, unless heads were asked for.
        if given is None or isinstance(given, MatrixAxes) or path not in described:
            continue
        if verdict.why == GIVEN and not must:
            continue
        if not paths.is_masked(leaf_at[path]):
            shape = tuple(leaf_at[path].shape)
            axes: Any = _of_heads(path, shape, given, described[path], must)
            # What names leave open, the description of the heads tells.
            why = verdict.why if verdict.is_known else "heads"
            found[i] = verdict._replace(numbers=axes, why=why, is_known=True)
    return found


def _of_heads(
    path: paths.Path,
    shape: tuple[int, ...],
    given: Axes,
    leaves: Sequence[tuple[bool, HeadLeaf]],
    must: bool,
) -> Axes:
    """The axes of a leaf, with the outputs of each of its heads as a matrix."""
    (_, leaf), *_ = leaves
    rank, heads = len(shape), leaf.head_axes
    if not heads:
        return given  # of all heads at once
    reduction, output = given.reduction_axis, given.output_axis
    if not leaf.split:
        # Heads have axes of their own: these are a stack. So is the axis that tells key
        # from value in Gemma's kernel of both.
        axes = [axis for axis in range(-leaf.ndim, 0) if axis not in heads]
        if len(axes) == 3 and len(leaf.parts) == 1 and {*leaf.parts} <= {*axes}:
            axes.remove(*leaf.parts)
        if len(axes) == 2:
            place = leaf.stack_of(rank)
            reduction, output = (place.axis(axis, rank) for axis in axes)
            if not {*leaf.parts} & {*axes}:
                return type(given)(reduction, output)
            # A part of each head's outputs, as the key of a latent kernel is.
            output = tuple(sorted(place.axis(axis, rank) for axis in (*heads, axes[1])))
    view = matrix_view(shape, MatrixAxes(reduction, output))
    # Which head each output belongs to, queries even and keys odd: keys may be fewer.
    # What no head scales, such as the value in a fused kernel, is a matrix of its own
    # from one head to the next.
    alone = tuple(n if i in view.output else 1 for i, n in enumerate(shape))
    owner = np.full(alone, -1)
    for is_key, each in leaves:
        if each.heads(alone) is not None:  # else QK-Clip's `init` says why
            place = each.stack_of(rank)
            own = each.owners(alone)
            stacked = tuple(place.start + i for i in range(place.depth))
            own = np.expand_dims(own, stacked)
            owner = np.where(own < 0, owner, 2 * own + is_key)
    owners = np.broadcast_to(owner, alone).ravel().tolist()
    runs = [(key, len(list(run))) for key, run in itertools.groupby(owners)]
    found = [key for key, _ in runs if key >= 0]
    if len(set(found)) < len(found):
        if not must:
            return given
        raise ValueError(
            f"per_head=True cannot cut '{paths.show(path)}' {shape}: the outputs of a "
            "head do not follow one another. Leave its layer out of attention=, or "
            "give the leaf mc.MatrixAxes in dimension_numbers"
        )
    return MatrixAxes(reduction, output, parts=tuple(size for _, size in runs))

"""One matrix per attention head, wherever the attention layers say that heads are."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._matrices.axes import Axes, MatrixAxes
from .._matrices.stacks import matrix_view
from .._options import flag
from .._parameters import paths
from .._parameters.dimension_numbers import (
    DimensionNumbers,
    resolve_verdicts,
)
from .._parameters.given import check_model, Model
from .._parameters.rules import ByNames
from .._parameters.verdict import Verdict
from .attention_layers import Attention, Layers, layers_of, resolve_attention
from .owned_leaf import OwnedLeaf


class MatrixRules(NamedTuple):
    """The user's word on matrices, from which the verdicts on any tree follow."""

    dimension_numbers: DimensionNumbers | None
    per_head: bool | None
    model: Model | None
    layers: Layers | None  # whose heads are cut apart

    def verdicts(self, tree: paths.PathedTree) -> list[Verdict]:
        """The verdict on each leaf, with heads as matrices where they are to be.

        As in Kimi K3 (arXiv:2607.24653, section 2.5) and GLM-5 (arXiv:2602.15763).
        """
        numbers, model = self.dimension_numbers, self.model
        is_cut = self.per_head is not False and self.layers is not None
        if model is None and not is_cut:
            # Names show which axes are heads in stock layers.
            return resolve_verdicts(numbers, tree, per_head=self.per_head)
        layers, leaf_at = resolve_attention(self.layers if is_cut else (), tree)
        described: dict[paths.Path, list[tuple[bool, OwnedLeaf]]] = {}
        for layer in layers:
            for leaf in layer.leaves:
                path = layer.path_of(leaf)
                own = described.setdefault(path, [])
                is_hidden = paths.is_masked(leaf_at[path])
                # Where one does not fit, QK-Clip's `init` says why.
                if not is_hidden and (owned := leaf.owned(tuple(leaf_at[path].shape))):
                    # The parts of a query with a rotary embedding and without are one
                    # head.
                    own.append((leaf in layer.key, owned))
        found = resolve_verdicts(numbers, tree, model=model, described=described)
        # A reading knows heads by the logits, which have none of the value's. An axis
        # that stock layers have for these counts with a reading as it does without.
        is_named = is_cut and model is not None
        named = ByNames(tree).verdicts(per_head=True) if is_named else {}
        for i, (path, verdict) in enumerate(zip(tree.paths, found, strict=True)):
            given, must = verdict.numbers, bool(self.per_head)
            # A bias goes to AdamW, whatever heads it has; what the user has cut stays,
            # and what the user has given, unless heads were asked for.
            if given is None or isinstance(given, MatrixAxes):
                continue
            if verdict.source == "given" and not must:
                continue
            if described.get(path):
                shape = tuple(leaf_at[path].shape)
                axes: Any = _of_heads(path, shape, given, described[path], must)
                # What names leave open, the description of the heads decides.
                kind = verdict.kind if verdict.is_known else "heads"
                found[i] = verdict._replace(numbers=axes, kind=kind, is_known=True)
            elif path in named and _cuts(
                named[path], given, tuple(leaf_at[path].shape)
            ):
                found[i] = verdict._replace(numbers=named[path].numbers)
        return found


def matrix_rules(
    per_head: bool | None,
    model: Model | None,
    dimension_numbers: DimensionNumbers | None,
    attention: Attention | None = None,
) -> MatrixRules:
    """The rules of what the user gave; heads are those of `attention`, else of `model`.

    `None` for `per_head` cuts what can be cut.
    """
    # What was made before, as by `muonclip` for `muon`, is all there is.
    if isinstance(dimension_numbers, MatrixRules):
        return dimension_numbers
    check_model(model)
    per_head = per_head if per_head is None else flag("per_head", per_head)
    # Layers that QK-Clip cannot act on have heads all the same.
    layers = layers_of(model, attention)
    return MatrixRules(dimension_numbers, per_head, model, layers)


def _cuts(named: Verdict, given: Axes, shape: tuple[int, ...]) -> bool:
    """Whether a name shows an axis of heads among a kernel's outputs."""
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
    """The axes of a leaf, with the outputs of each of its heads as a matrix."""
    (_, leaf), *_ = leaves
    if all(x.owners.size == 1 for _, x in leaves):
        return given  # of all heads at once
    reduction, output = given.reduction_axis, given.output_axis
    axes = [i for i in range(len(shape)) if i not in leaf.stack]
    along = dict(zip(axes, map(leaf.along, range(len(axes))), strict=True))
    cut = {i for i in axes if leaf.mask.shape[i] > 1 and along[i][1] == 1}
    heads = {i for i in axes if along[i][1] > 1}
    if len(axes) > 2 and all(along[i][0] == along[i][1] for i in heads):
        # Heads have axes of their own: these are a stack. So is the axis that has key
        # and value in Gemma's kernel of both. An axis of one head is not seen as one.
        rest = [i for i in axes if i not in heads and shape[i] > 1]
        if len(rest) == 3 and len(cut) == 1:
            rest.remove(*cut)
        if len(rest) == 2:
            reduction, output = rest
            if not cut & {*rest}:
                return type(given)(reduction, output)
            # A part of each head's outputs, as the key of a latent kernel is.
            output = tuple(sorted((*heads, output)))
    view = matrix_view(shape, MatrixAxes(reduction, output))
    # Which head each output belongs to, queries even and keys odd: keys may be fewer.
    # What no head scales, such as the value in a fused kernel, is a matrix of its own
    # from one head to the next.
    alone = tuple(n if i in view.output else 1 for i, n in enumerate(shape))
    inputs = tuple(i for i in range(len(shape)) if i not in view.output)
    owner = np.full(alone, -1)
    for is_key, each in leaves:
        own = np.expand_dims(each.owners, each.stack).max(inputs, keepdims=True)
        owner = np.where(own < 0, owner, 2 * own + is_key)
    owners = np.broadcast_to(owner, alone).ravel().tolist()
    runs = [(key, len(list(run))) for key, run in itertools.groupby(owners)]
    found = [key for key, _ in runs if key >= 0]
    if len(set(found)) < len(found):
        if not must:
            return given
        raise ValueError(
            f"per_head=True cannot cut '{paths.show(path)}' {shape}: the outputs of a "
            "head are not consecutive. Leave its layer out of attention=, or give the "
            "leaf mc.MatrixAxes in dimension_numbers"
        )
    return MatrixAxes(reduction, output, parts=tuple(size for _, size in runs))

"""Dimension numbers of a parameter tree: found, given by the user, or asked about."""

from __future__ import annotations  # help() shows aliases by name

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from optax.contrib import MuonDimensionNumbers

from .._calls import explained
from .._matrices.axes import is_axes, MatrixAxes
from .._matrices.stacks import matrix_view, MatrixView
from .._options import check_flag
from . import names, paths
from .fit import check_params
from .given import (
    AUTOMATIC,
    broadcast,
    by_pattern,
    check_no_number,
    is_patterns,
)
from .layer_stacks import IN_FRONT, StackAxes
from .leaf_rules import ByNames
from .question import question
from .verdict import UnknownDirection, Verdict


#: The label of a leaf that a reading says has no gradient: nothing updates it.
FROZEN = "frozen"

#: A tree of `MuonDimensionNumbers` (or `None`, for AdamW), a prefix of one, a mapping
#: from patterns of paths, or a function that makes one of these from the parameters.
#: Trees are of other nodes than tuples, as a pair of axes would be.
Entry = MuonDimensionNumbers | MatrixAxes | Literal["auto"] | None
DimensionNumbers = (
    Mapping[str, Entry | Mapping[str, Any] | list[Any]]
    | list[Any]
    | Entry
    | Callable[[Any], Any]
)


@explained
def flax_dimension_numbers(
    params: Any,
    *,
    per_head: bool = False,
    stack_axes: StackAxes = IN_FRONT,
    dimension_numbers: Mapping[str, Any] | None = None,
) -> Any:
    """Finds the axes that form matrices in every leaf, by names and shapes.

    Written as inputs -> outputs, a kernel of

    - `Dense` or `Linear` is `(in -> out)`; `(out, in)` if the bias or the framework
        shows it: `weight` of Equinox and Haliax, GPT-2 of HuggingFace;
    - attention's query, key or value is `(in -> heads, head_dim)`, its output
        `(heads, head_dim -> out)`, under the names in use (`query`, `q_proj`, `wq`,
        Gemma's `q_einsum`), if the shapes fit together;
    - `Conv` is `(*window, in -> out)`; a depthwise one is not a matrix;
    - `DenseGeneral`, `LinearGeneral` or `Einsum` is split according to its bias.

    A stack of layers is an axis (the first, second or last) that all leaves of a module
    share, including norms, or an axis that the params name `layers`
    (`nn.LogicallyPartitioned`, `out_sharding` of NNX, Haliax). If an update gets params
    without these names, as from `nnx.Optimizer`, pass the tree that this returns. A
    stack of experts is recognized by its router. Each matrix of a stack is separate.

    Embeddings, positions, norms, biases, routers and leaves of rank 0 or 1 in one layer
    are `None`, for AdamW. An output head is `None`, too: its name says so, or the size
    of the vocabulary, or it is the one layer with a bias whose outputs no other layer
    uses. Any other leaf that may be a head raises an error. A leaf of rank 2 with an
    unknown name is a matrix. [`describe`][] shows the rule that decided.

    **Arguments:**

    - `params`: Linen variables or params, an NNX state, an Equinox module, or any
        pytree of arrays or `jax.ShapeDtypeStruct`. Leaves that `optax.masked` hides are
        left hidden.
    - `per_head`: whether every head of a query, key or value projection is a matrix of
        its own, as in Kimi K3 (arXiv:2607.24653, section 2.5) and GLM-5. For heads that
        only `model=` or `attention=` shows, use `per_head` of [`muon`][].
    - `stack_axes`: the axis of the layers in the leaves of a module that `nn.scan` or
        `nnx.vmap` stacks, if the leaves do not show it, such as `{"decoder/layers": 1}`
        or -1 for the last axis. Leaves in it are judged without that axis: a number or
        a vector in one layer is not a matrix.
    - `dimension_numbers`: rules by path that override this: shell-style
        patterns, and `optax.contrib.MuonDimensionNumbers`, `None` for AdamW, or
        `"auto"`. The longest pattern that matches a path, or a module above it, wins.

    **Returns:** a tree like `params` of `optax.contrib.MuonDimensionNumbers` or `None`.

    **Raises:** `ValueError` for leaves that names and shapes do not determine, with
    their paths and a mapping to paste as `dimension_numbers`; for patterns that match
    nothing; and for `stack_axes` that a leaf does not have.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> from optax.contrib import MuonDimensionNumbers
        >>> params = {
        ...     "attn": {"query": {"kernel": jnp.ones((16, 4, 8))}},
        ...     "experts_up": jnp.ones((4, 16, 32)),
        ... }
        >>> rules = {"experts_*": MuonDimensionNumbers(-2, -1)}
        >>> numbers = mc.flax_dimension_numbers(params, dimension_numbers=rules)
        >>> numbers["attn"]["query"]["kernel"]
        MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
    """
    check_params("flax_dimension_numbers(params)", params)
    tree = paths.flatten(params)
    named = ByNames(tree, stack_axes).verdicts(check_flag("per_head", per_head))
    verdicts = resolve_verdicts(dimension_numbers, tree, lambda _: named)
    return tree.unflatten(verdict.numbers for verdict in verdicts)


def resolve_verdicts(
    dimension_numbers: DimensionNumbers | None,
    tree: paths.PathedTree,
    read: Callable[[paths.PathedTree], Mapping[paths.Path, Verdict]],
    *,
    is_named_per_head: bool = False,
    described: Collection[paths.Path] = (),
) -> list[Verdict]:
    """Returns the verdict on each leaf, whichever way its numbers were given.

    `read` finds the verdicts on leaves that no pattern matches. Leaves that are
    `described` otherwise may be left open.

    **Raises:** `ValueError` that lists the leaves that nothing determines.
    """
    if not tree.paths:
        # `optax.tree.map_params` calls `init` with a placeholder that has no leaves.
        return []
    given: Any = dimension_numbers
    # A function may answer None: AdamW for all of its leaves.
    is_automatic = given is None
    if not is_automatic and paths.is_function(given):
        given = given(tree.rebuilt())
    if not is_automatic and not is_patterns(given, tree):
        check_no_number("dimension_numbers", given, tree)
        if is_named_per_head:
            raise ValueError(
                "per_head=True has no effect with dimension_numbers for all leaves: "
                "give patterns, or mc.flax_dimension_numbers(params, per_head=True)"
            )
        entries = broadcast(
            given,
            tree,
            name="dimension_numbers",
            is_entry=is_axes,
            expected="optax.contrib.MuonDimensionNumbers, mc.MatrixAxes",
            remedy="; to give rules and have the rest found automatically, write "
            "patterns, such as 'mlp*' in place of 'mlp'",
        )
        return [_given(entry) for entry in entries]
    verdicts = {**read(tree)}
    for path, numbers in (by_pattern(given, tree.paths) if given else {}).items():
        if numbers != AUTOMATIC and verdicts[path].source != "hidden":
            verdicts[path] = _given(numbers)
    asked = [p for p, x in verdicts.items() if not x.is_known and p not in described]
    if asked:
        raise ValueError(question(tree, verdicts, asked))
    return list(verdicts.values())


def _given(numbers: Any) -> Verdict:
    label = "matrix" if is_axes(numbers) else "vector"
    return Verdict(label, numbers, "given", "given")


def completed(tree: paths.PathedTree, read: Sequence[Verdict]) -> list[Verdict]:
    """Returns a trace's verdicts, with those by names where it does not show a use.

    Names are asked once, about the whole tree, so that all who use a reading say the
    same of a leaf, and a mask changes nothing. A leaf that names leave open, too, is a
    vector that the user is asked about.
    """
    if not any(
        not x.is_known or (x.kind == "elementwise" and names.is_layer(path))
        for path, _, x in tree.rows(read)
    ):
        return [*read]
    named, verdicts = ByNames(tree).verdicts(), []
    for path, _, traced in tree.rows(read):
        by_name = named[path]
        is_kernel = by_name.numbers is not None and by_name.is_known
        if not traced.is_known:
            label = by_name.label if by_name.is_known else "vector"
            line, use = traced.line, traced.kind
            traced = by_name._replace(label=label, source="unread", line=line, use=use)
        # By its name it is a kernel, by the trace it is multiplied entry by entry.
        # Either may be wrong, as where a reading lacks a rule for a library's products.
        elif traced.kind == "elementwise" and is_kernel and names.is_layer(path):
            kind = "a kernel by its name, but multiplied entry by entry at "
            changes = dict(numbers=by_name.numbers, kind=kind + traced.line)
            traced = traced._replace(**changes, is_known=False)
        verdicts.append(traced)
    return verdicts


def views_of(
    verdicts: Sequence[Verdict], tree: paths.PathedTree
) -> list[MatrixView | None]:
    """Returns a view per leaf, `None` for one that is hidden or holds no matrix."""
    views: list[MatrixView | None] = [None] * len(verdicts)
    for i, (path, leaf, verdict) in enumerate(tree.rows(verdicts)):
        numbers: Any = verdict.numbers
        if numbers is None or paths.is_masked(numbers) or paths.is_masked(leaf):
            continue
        shape = tuple(leaf.shape)
        try:
            view = matrix_view(shape, numbers)
        except ValueError as error:
            where = f"dimension_numbers for '{paths.show(path)}' with shape {shape}"
            raise ValueError(f"{where}: {error}") from None
        # A square matrix has one scale, whichever side is the input.
        is_directed = (
            not isinstance(numbers, UnknownDirection) or view.fan_in == view.fan_out
        )
        views[i] = dataclasses.replace(view, is_directed=is_directed)
    return views

"""A table of a model's leaves: their matrices, optimizer and role in attention."""

import optax

from ._matrices.pieces import pieces_of
from ._matrices.stacks import plan_stacks
from ._matrices.view import MatrixView
from ._model.attention_layers import Attention, ROLES
from ._model.finder import resolve_attention
from ._model.model import attention_of
from ._model.per_head import heads_apart
from ._options import flag
from ._parameters import paths
from ._parameters.dimension_numbers import DimensionNumbers, resolve_verdicts, views_of
from ._parameters.given import Model
from ._parameters.reading import Verdict


_COLUMNS = ("path", "shape", "matrices", "optimizer", "why", "attention")


def describe(
    params: optax.Params,
    *,
    model: Model | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    attention: Attention | None = None,
    per_head: bool | None = None,
    stacks: bool = False,
) -> str:
    """Returns a table with a row for each leaf: its matrices and its optimizer.

    Matrices are given as count x fan-in x fan-out. "why" is what decided the optimizer,
    with a question mark where the evidence is weak. "attention" is the leaf's role for
    QK-Clip. Where QK-Clip cannot act on the attention of stock Flax, the table is the
    one for [`muon`][], with the reason below it.

    **Arguments:**

    - `params`: as for [`flax_dimension_numbers`][].
    - `model`, `dimension_numbers`, `attention`, `per_head`: as for [`muonclip`][].
    - `stacks`: whether to list, below, the stacks of matrices that Muon orthogonalizes
        together, as count x short side x long side and the dtype of the params.

    **Returns:** a string of lines.

    **Raises:** `ValueError` as [`flax_dimension_numbers`][] and [`qk_clip`][] do.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> kernel = jnp.ones((16, 2, 8))
        >>> attn = {"query": {"kernel": kernel}, "key": {"kernel": kernel}}
        >>> params = {"attn": attn, "norm": {"scale": jnp.ones(16)}}
        >>> print(mc.describe(params, stacks=True))
        path               shape       matrices    optimizer  why        attention
        attn/key/kernel    (16, 2, 8)  2 x 16 x 8  muon       attention  key, 2 heads
        attn/query/kernel  (16, 2, 8)  2 x 16 x 8  muon       attention  query, 2 heads
        norm/scale         (16,)       -           adamw      vector     -
        <BLANKLINE>
        orthogonalized together:
        4 x 8 x 16 float32 from 2 leaves
    """
    if params is None:
        raise ValueError("describe needs the params, got None")
    tree = paths.flatten(params)
    attention = attention_of(model, attention)
    settings = heads_apart(per_head, model, dimension_numbers, attention)
    verdicts = resolve_verdicts(tree=tree, **settings)
    views = views_of([verdict.numbers for verdict in verdicts], tree)
    roles, refusal = _roles_or_refusal(attention, tree)
    rows = [_COLUMNS] + [
        _row(*entry, roles)
        for entry in zip(tree.paths, tree.leaves, views, verdicts, strict=True)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    table = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if flag("stacks", stacks):
        # As on CPU and GPU, which turn tall matrices and stack them with wide ones.
        pieces = [
            (leaf, piece.view.wide)
            for leaf, view in zip(tree.leaves, views, strict=True)
            for piece in (pieces_of(view) if view else ())
        ]
        plan = plan_stacks([x for x, _ in pieces], [view for _, view in pieces])
        table += [
            "",
            "orthogonalized together:",
            *(map(str, plan) if plan else ["nothing"]),
        ]
    return "\n".join(table + (["", refusal] if refusal else []))


def _row(
    path: paths.Path, leaf, view: MatrixView | None, verdict: Verdict, roles
) -> tuple[str, ...]:
    if paths.is_masked(leaf):
        return (paths.show(path), "masked", "-", "-", "-", "-")
    shape, parts = tuple(leaf.shape), []
    for role, part in roles.get(path, ()):
        # A leaf that all heads share has no count; one that does not fit has none yet,
        # and QK-Clip's `init` says why.
        count = "all" if part.axis is None else part.heads(shape)
        parts.append(f"{role}, {'no' if count is None else count} heads")
    return (
        paths.show(path),
        str(shape),
        _matrices(view) if view else "-",
        "muon" if view else "adamw",
        verdict.why + ("" if verdict.is_sure else "?"),
        " + ".join(parts) or "-",
    )


def _matrices(view: MatrixView) -> str:
    """Count x fan-in x fan-out of each piece; of those of one shape together."""
    counts: dict[tuple[int, int], int] = {}
    for piece in pieces_of(view):
        shape = piece.view.matrix_shape
        counts[shape] = counts.get(shape, 0) + piece.view.count
    return " + ".join(f"{n} x {a} x {b}" for (a, b), n in counts.items())


def _roles_or_refusal(
    attention: Attention | None, tree: paths.PathedTree
) -> tuple[dict[paths.Path, list], str]:
    """The roles of each leaf that carries heads, by path, or why there are none."""
    try:
        layers = resolve_attention(attention, tree)
    except ValueError as error:
        # A wrong `attention=` is the caller's mistake. Attention that was only looked
        # for is no reason to withhold the table, which helps to describe it.
        if attention is not None:
            raise
        return {}, str(error)
    roles: dict[paths.Path, list] = {}
    for layer in layers:
        for role in ROLES:
            # A fused kernel has several roles, each with a part of it.
            for leaf in getattr(layer, role):
                roles.setdefault(layer.path_of(leaf), []).append((role, leaf))
    return roles, ""

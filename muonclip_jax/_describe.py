"""A table of a model's leaves: their matrices, optimizer and role in attention."""

import html
import math
import re

import optax

from ._matrices.pieces import pieces_of
from ._matrices.stacks import MatrixView, plan_stacks
from ._model.attention_layers import (
    Attention,
    attention_of,
    resolve_attention,
    ROLES,
)
from ._model.per_head import heads_apart
from ._options import flag
from ._parameters import paths
from ._parameters.by_names import Verdict
from ._parameters.dimension_numbers import DimensionNumbers, resolve_verdicts, views_of
from ._parameters.given import Model


_COLUMNS = ("path", "shape", "matrices", "optimizer", "why", "attention")
# The part of a path that counts layers or experts: `3`, `layer_3`.
_INDEX = re.compile(r"(|.*_)(\d+)")

_Row = tuple[str, ...]


class _Table(str):
    """Text that a notebook shows as an HTML table."""

    rows: list[_Row]
    below: str

    def _repr_html_(self) -> str:
        cells = [[html.escape(cell) for cell in row] for row in self.rows]
        head, *body = ("</td><td>".join(row) for row in cells)
        body = "".join(f"<tr><td>{row}</td></tr>" for row in body)
        head = head.replace("td>", "th>")
        return (
            f"<table><thead><tr><th>{head}</th></tr></thead><tbody>{body}</tbody>"
            f"</table><pre>{html.escape(self.below)}</pre>"
        )


def describe(
    params: optax.Params,
    *,
    model: Model | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    attention: Attention | None = None,
    per_head: bool | None = None,
    stacks: bool = False,
    collapse: bool = True,
) -> str:
    """Returns a table with a row for each leaf: its matrices and its optimizer.

    Rows of repeated layers that differ in their index alone are one row, `blocks/0-11`.
    Below are the parameters and the bytes of state of each optimizer, for momentum in
    the dtype of the params. In a notebook the table is HTML.

    Matrices are given as count x fan-in x fan-out. "why" is what decided the optimizer,
    with a question mark where the evidence is weak. "attention" is the leaf's role for
    QK-Clip. Where QK-Clip cannot act on the attention of stock Flax, the table is the
    one for [`muon`][], with the reason below it.

    **Arguments:**

    - `params`: as for [`flax_dimension_numbers`][].
    - `model`, `dimension_numbers`, `attention`, `per_head`: as for [`muonclip`][].
    - `stacks`: whether to list, below, the stacks of matrices that Muon orthogonalizes
        together, as count x short side x long side and the dtype of the params.
    - `collapse`: whether repeated layers share a row; `False` lists every leaf.

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
        optimizer  parameters  share  state
        muon       512         97 %   2.0 kB
        adamw      16          3 %    128 B
        both       528         100 %  2.2 kB
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
    views = views_of(verdicts, tree)
    roles, refusal = _roles_or_refusal(attention, tree)
    rows = [
        _row(*entry, roles)
        for entry in zip(tree.paths, tree.leaves, views, verdicts, strict=True)
    ]
    if flag("collapse", collapse):
        # Experts within a layer first, then layers, whose rows are alike by then.
        for place in reversed(range(max(map(len, tree.paths), default=0))):
            rows = _collapsed(rows, place)
    rows = [_COLUMNS, *rows]
    below = ["", *_aligned(_totals(tree, views))]
    if flag("stacks", stacks):
        # As on CPU and GPU, which turn tall matrices and stack them with wide ones.
        pieces = [
            (leaf, piece.view.wide)
            for leaf, view in zip(tree.leaves, views, strict=True)
            for piece in (pieces_of(view) if view else ())
        ]
        plan = plan_stacks([x for x, _ in pieces], [view for _, view in pieces])
        below += [
            "",
            "orthogonalized together:",
            *(map(str, plan) if plan else ["nothing"]),
        ]
    below += ["", refusal] if refusal else []
    table = _Table("\n".join(_aligned(rows) + below))
    table.rows, table.below = rows, "\n".join(below).strip()
    return table


def _collapsed(rows: list[_Row], place: int) -> list[_Row]:
    """Joins rows that differ alone in the index at one place of the path."""
    found: dict[tuple[str, ...], list[int]] = {}
    for path, *cells in rows:
        parts = path.split("/")
        match = _INDEX.fullmatch(parts[place]) if place < len(parts) else None
        before = "/".join([*parts[:place], match[1]]) if match else path
        after = "/".join(["", *parts[place + 1 :]]) if match else ""
        numbers = found.setdefault((before, after, *cells), [])
        numbers += [int(match[2])] if match else []
    joined = []
    for (before, after, *cells), numbers in found.items():
        # Runs without a gap: number minus position is the same for all of one.
        runs: dict[int, list[int]] = {}
        for i, number in enumerate(sorted(numbers)):
            runs.setdefault(number - i, []).append(number)
        spans = [f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs.values()]
        joined += [(before + span + after, *cells) for span in spans or [""]]
    return joined


def _totals(tree: paths.PathedTree, views: list[MatrixView | None]) -> list[_Row]:
    """What each optimizer has: momentum for Muon, two moments for AdamW."""
    count, memory = {"muon": 0, "adamw": 0}, {"muon": 0, "adamw": 0}
    for leaf, view in zip(tree.leaves, views, strict=True):
        if not paths.is_masked(leaf):
            name, copies = ("muon", 1) if view else ("adamw", 2)
            count[name] += math.prod(leaf.shape)
            memory[name] += copies * math.prod(leaf.shape) * leaf.dtype.itemsize
    count["both"], memory["both"] = sum(count.values()), sum(memory.values())
    rows = [("optimizer", "parameters", "share", "state")]
    for name, n in count.items():
        share, size, unit = n / max(count["both"], 1), float(memory[name]), "B"
        for larger in ("kB", "MB", "GB", "TB"):
            if size >= 1000:
                size, unit = size / 1000, larger
        state = f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        rows.append((name, f"{n:,}", f"{100 * share:.0f} %", state))
    return rows


def _aligned(rows: list[_Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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

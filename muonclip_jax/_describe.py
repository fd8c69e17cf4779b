"""A table of a model's leaves: their matrices, optimizer and role in attention."""

from __future__ import annotations  # help() shows aliases by name

import inspect
import itertools
import math
from typing import Any

import optax

from ._calls import explained
from ._layout.layout import Layout
from ._layout.shardings import locate, mesh_axes, PlacedLeaf
from ._matrices.pieces import pieces_of
from ._matrices.stacks import MatrixLeaf, MatrixView, plan_stacks
from ._model.attention_layers import Attention
from ._model.knowledge import knowledge_of
from ._model.model_reading import ModelReading
from ._muon.leaves import optimizer_of, read_leaves
from ._muon.muon import muon
from ._muon.weight_decay import check_rates, decay_mask, Mask
from ._options import check_flag
from ._parameters import paths
from ._parameters.dimension_numbers import DimensionNumbers, FROZEN
from ._parameters.fit import check_params
from ._qk_clip.heads import Heads
from ._tables import leaf_table, Row, totals


_COLUMNS = ("path", "shape", "matrices", "optimizer", "why", "attention")
# Read off, so that the table shows what `muon` does whatever the default is.
_DEFAULT_DECAY = inspect.signature(muon).parameters["weight_decay"].default


@explained
def describe(
    params: Any,
    *,
    model: ModelReading | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    attention: Attention | None = None,
    per_head: bool | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    weight_decay_mask: Mask = None,
    adam_weight_decay: optax.ScalarOrSchedule | None = None,
    stacks: bool = False,
    collapse: bool = True,
) -> str:
    """Returns a table with a row for each leaf: its matrices and its optimizer.

    Rows of repeated layers that differ only in their index are one row, `blocks/0-11`.
    Below are the parameters and the bytes of state of each optimizer, for momentum in
    the dtype of the params. In a notebook the table is HTML. If params are arrays on a
    mesh with automatic axes that cut matrices, a line says what `shardings=` spares.

    Matrices are given as count x fan-in x fan-out. "why" is the reason for the
    optimizer, with a question mark if the evidence is weak. "attention" is the leaf's
    role for QK-Clip. If QK-Clip cannot act on attention that names or a `model` show,
    the table is that for [`muon`][], with the reason below it.

    **Arguments:**

    - `params`: as for [`flax_dimension_numbers`][], or a module of NNX or Equinox.
    - `model`: as for [`muon`][].
    - `dimension_numbers`: as for [`muon`][].
    - `attention`: as for [`muonclip`][].
    - `per_head`: as for [`muon`][].
    - `weight_decay`: as for [`muon`][]. With this or one of the next two arguments the
        table has a column "decay", the weight decay of each leaf.
    - `weight_decay_mask`: as for [`muon`][].
    - `adam_weight_decay`: as for [`muon`][].
    - `stacks`: whether to list, below, the stacks of matrices that Muon orthogonalizes
        together, as count x short side x long side and the dtype of the params.
    - `collapse`: whether repeated layers share a row; `False` lists every leaf.

    **Returns:** a string of lines.

    **Raises:** `ValueError` as [`flax_dimension_numbers`][] does, and as [`qk_clip`][]
    for `attention` that does not fit.

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
    check_params("describe(params)", params)
    params = paths.params_of(params)
    knowledge = knowledge_of(model, attention, dimension_numbers, per_head)
    layout = read_leaves(params, knowledge)
    try:
        roles, refusal = _roles(Heads(layout, knowledge)), ""
    except ValueError as error:
        # A wrong `attention=` is the caller's mistake. Attention that was only looked
        # for is no reason to withhold the table, which helps to describe it.
        if attention is not None:
            raise
        roles, refusal = {}, str(error)
    rates, names, decays = (weight_decay, adam_weight_decay), _COLUMNS, None
    if any(x is not None for x in (*rates, weight_decay_mask)):
        # The column stands next to the optimizer's.
        names = (*names[:4], "decay", *names[4:])
        decays = _decays(layout, *rates, weight_decay_mask)
    columns: list[Row] = [names, *(_row(x, roles, decays) for x in layout.leaves)]
    blocks = [_totals(layout)]
    if check_flag("stacks", stacks):
        # As on CPU, where tall matrices are turned and share stacks with wide ones.
        pieces = [
            MatrixLeaf(leaf.array, piece.view.wide)
            for leaf in layout.leaves
            for piece in (pieces_of(leaf.view) if leaf.view else ())
        ]
        stacked = [*map(str, plan_stacks(enumerate(pieces)))] or ["nothing"]
        blocks += [["orthogonalized together:", *stacked]]
    blocks += [[refusal]] if refusal else []
    blocks += [_untold(layout)]
    read = model if attention is None else None
    return leaf_table(
        columns, blocks, model=read, collapse=check_flag("collapse", collapse)
    )


def _untold(layout: Layout) -> list[str]:
    """Says what `shardings=` spares under `jit`, if automatic axes cut matrices."""
    sizes: dict[str, int] = {}
    # Leaf by leaf: parts of a model may be on meshes of their own.
    for leaf in (locate(leaf, None) for leaf in layout.leaves):
        if leaf.view and leaf.mesh is not None and leaf.spec:
            of_matrices = {*leaf.view.reduction, *leaf.view.output}
            cut = (mesh_axes(x) for i, x in enumerate(leaf.spec) if i in of_matrices)
            untold = {*itertools.chain(*cut)} & {*leaf.mesh.auto_axes}
            sizes |= {x: n for x, n in leaf.mesh.shape.items() if x in untold and n > 1}
    if not sizes:
        return []
    axes = ", ".join(f"'{name}' ({size})" for name, size in sizes.items())
    return [
        f"the mesh cuts matrices along {axes}",
        "under jit give muon(..., shardings=): without it up to 2.2 times as much is "
        "sent on the meshes of our tests",
    ]


def _totals(layout: Layout) -> list[str]:
    """The state of each optimizer: momentum for Muon, two moments for AdamW."""
    sizes, copies = [], {"muon": 1, "adamw": 2, FROZEN: 0}
    for leaf in layout.leaves:
        x, name = leaf.array, optimizer_of(leaf)
        if not paths.is_masked(x):
            count = math.prod(x.shape)
            sizes.append((name, count, copies[name] * count * x.dtype.itemsize))
    is_frozen = any(name == FROZEN for name, *_ in sizes)
    groups, whole = [*copies][: 2 + is_frozen], "all" if is_frozen else "both"
    return totals(("optimizer", "state"), sizes, groups, whole, _bytes)


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _decays(
    layout: Layout,
    of_muon: optax.ScalarOrSchedule | None,
    of_adam: optax.ScalarOrSchedule | None,
    mask: Mask,
) -> dict[paths.Path, str]:
    """The decay of each leaf: a number, a schedule, or nothing."""
    if of_muon is None:
        of_muon = _DEFAULT_DECAY
    if of_adam is None:
        of_adam = of_muon
    check_rates(weight_decay=of_muon, adam_weight_decay=of_adam)
    masks = decay_mask(mask, layout.tree)
    if masks is None:
        # Not `True`: what a mask around this hides has no entry, either.
        masks = layout.tree.unflatten([True] * len(layout.leaves))
    rates = {"muon": of_muon, "adamw": of_adam, FROZEN: 0}
    shown = {
        name: "schedule" if callable(x) else f"{x:g}" if x else "-"
        for name, x in rates.items()
    }
    return {
        leaf.path: shown[optimizer_of(leaf)] if leaf.array is True else "-"
        for leaf in layout.of(masks)
    }


def _row(
    leaf: PlacedLeaf,
    roles: dict[paths.Path, list[str]],
    decays: dict[paths.Path, str] | None,
) -> tuple[str, ...]:
    path, x = leaf.path, leaf.array
    decay = [decays[path]] if decays else []
    if paths.is_masked(x):
        return (paths.show(path), "masked", "-", "-", *decay, "-", "-")
    return (
        paths.show(path),
        str(tuple(x.shape)),
        _matrices(leaf.view) if leaf.view else "-",
        optimizer_of(leaf),
        *decay,
        leaf.verdict.why if leaf.verdict else "-",
        " + ".join(roles.get(path, ["-"])),
    )


def _matrices(view: MatrixView) -> str:
    """Count x fan-in x fan-out of each piece; of those of one shape together."""
    counts: dict[tuple[int, int], int] = {}
    for piece in pieces_of(view):
        shape = piece.view.matrix_shape
        counts[shape] = counts.get(shape, 0) + piece.view.count
    return " + ".join(f"{n} x {a} x {b}" for (a, b), n in counts.items())


def _roles(heads: Heads) -> dict[paths.Path, list[str]]:
    """The roles of each leaf that carries heads, by its path."""
    roles: dict[paths.Path, list[str]] = {}
    for use, share in heads.shares():
        # A fused kernel has several roles, each with a part of it.
        count = "all" if use.leaf.heads == 1 else use.leaf.heads
        stays = "" if share else ", stays"
        roles.setdefault(use.path, []).append(f"{use.role}, {count} heads{stays}")
    return roles

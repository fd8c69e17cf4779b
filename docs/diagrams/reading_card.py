"""The marks of a model's heads, from the softmax back to a fused kernel.

The model is read as `read_model` reads it; the arrays are those of its trace, and the
marks what its own rules make of them, one equation after the other.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from card import ACCENT, Card, COLORS, FAINT, GRAY, INK
from internals import call_of, Facts, Graph, head_ids, heads_of, moves, Softmaxes

import muonclip_jax as mc


LENGTH, FEATURES, HEADS, DIM = 4, 5, 3, 2
HEAD = 1  # the one in color
CELL, GAP, WIDTH, PITCH = 12, 8, 640, 104
MIDDLE, SIDES, TOP = WIDTH / 2, (136, WIDTH - 136), 60
QUERY_AND_KEY = (("query", COLORS[0]), ("key", COLORS[1]))


class Step(NamedTuple):
    """An array on the way back, with its marks, and what made it of the next."""

    shape: tuple[int, ...]
    marks: np.ndarray
    made_by: str


def loss(params: Any, x: jax.Array) -> jax.Array:
    y = x @ params["qkv"]
    q, k, v = (z.reshape(LENGTH, HEADS, DIM) for z in jnp.split(y, 3, axis=-1))
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return jnp.einsum("hqk,khd->qhd", weights, v).sum()


def reading_card() -> Card:
    logits, *sides = ways_back()
    rows = [max(len(side) for side in sides), *map(len, sides)]
    assert len({*rows}) == 1, "query and key go back through as many equations"
    title = "One head of three, from the softmax back to its weights"
    card = Card(WIDTH, _y(rows[0] + 1) + 36, title)
    _draw_array(card, MIDDLE, 0, "logits", logits, ACCENT)
    for side, x, (name, color) in zip(sides, SIDES, QUERY_AND_KEY, strict=True):
        _draw_arrow(card, MIDDLE, 0, x, 1)
        for row, step in enumerate(side[:-1], 1):
            _draw_array(card, x, row, name if row == 1 else "", step, color)
            is_last = row == rows[0] - 1
            to = MIDDLE + (x - MIDDLE) / 5 if is_last else x
            _draw_arrow(card, x, row, to, row + 1)
    for row, step in enumerate([logits, *sides[0][:-1]]):
        y = _y(row + 1) + (2 if row == 0 else -22)
        card.text(MIDDLE, y, step.made_by, mono=True, color=ACCENT)
    _draw_kernel(card, rows[0], [side[-1] for side in sides])
    _draw_legend(card, _y(rows[0] + 1) + 10)
    return card


def ways_back() -> tuple[Step, list[Step], list[Step]]:
    """The logits, and what query and key were made of, back to the parameter.

    What arrives there has to be what `read_model` returns.
    """
    params = {"qkv": jax.ShapeDtypeStruct((FEATURES, 3 * HEADS * DIM), jnp.float32)}
    x = jax.ShapeDtypeStruct((LENGTH, FEATURES), jnp.float32)
    with call_of(loss, params, x) as call:
        graph = Graph(call.body, [True])
    softmaxes = Softmaxes(graph, Facts(graph))
    (softmax,) = softmaxes.all()
    (product,) = softmaxes.products(softmax)
    heads = heads_of(softmaxes.scaling, product, (0, 1))
    made = [product.side(i, heads.marks) for i in (0, 1)]
    query, key = (_way_back(graph, product.operand(i), made[i]) for i in (0, 1))
    (layer,) = mc.read_model(loss, params, x).attention
    for side, (leaf,) in ((query, layer.query), (key, layer.key)):
        found = head_ids(side[-1].marks, (1 << heads.number) - 1)
        read = leaf.owned(params["qkv"].shape)
        assert read is not None and found is not None
        assert np.array_equal(found[0], read.head_ids)
    return Step(product.eqn.output().shape, heads.marks, product.eqn.name), query, key


def _way_back(graph: Graph, atom: Any, marks: np.ndarray) -> list[Step]:
    """Down to the parameter that an array was made of; none if it is data."""
    (origin,) = graph.origins(atom, (marks,))
    if origin.parameter is not None:
        return [Step(atom.shape, marks, "")]
    if origin.eqn is None:
        return []
    for i, move in moves(origin.eqn, origin.k):
        if rest := _way_back(graph, origin.eqn.inputs()[i], move(marks)):
            return [Step(atom.shape, marks, origin.eqn.name), *rest]
    return []


# A row for each array of the trace, its name and its shape below it.


def _y(row: float) -> float:
    return TOP + row * PITCH


def _draw_array(
    card: Card, x: float, row: int, name: str, step: Step, color: str
) -> None:
    _draw_marks(card, x, _y(row), step, color)
    words = f"{name} {_shown(step.shape)}".strip()
    words += f", marks {_shown(step.marks.shape)}"
    card.text(x, _y(row) + LENGTH * CELL + 13, words)


def _draw_marks(card: Card, x: float, y: float, step: Step, color: str) -> None:
    """A rectangle for each entry of the marks; heads of their own axis are apart."""
    shape, marks = step.shape, step.marks
    axis = next((a for a in range(len(shape) - 1) if marks.shape[a] > 1), None)
    groups = 1
    if axis is not None:
        groups = shape[axis]
        shape = shape[:axis] + shape[axis + 1 :]
        marks = np.moveaxis(marks, axis, 0)
    marks = marks.reshape(groups, *marks.shape[-2:])
    rows, columns = shape
    width, height = columns * CELL, rows * CELL
    left = x - (groups * (width + GAP) - GAP) / 2
    for group in marks:
        for i, j in np.ndindex(group.shape):
            w, h = width / group.shape[1], height / group.shape[0]
            mark = int(group[i, j])
            fill = color if mark >> HEAD & 1 else FAINT if mark else "#ffffff"
            stroke = "#ffffff" if mark else FAINT
            card.box(left + j * w, y + i * h, w, h, fill=fill, stroke=stroke, radius=1)
        left += width + GAP


def _draw_kernel(card: Card, row: int, ends: list[Step]) -> None:
    """The parameter, with the marks that arrive at it from both sides."""
    shape, y = ends[0].shape, _y(row)
    left = MIDDLE - shape[1] * CELL / 2
    nothing = Step(shape, np.zeros_like(ends[0].marks), "")
    _draw_marks(card, MIDDLE, y, nothing, INK)
    for end, (_, color) in zip(ends, QUERY_AND_KEY, strict=True):
        for j, mark in enumerate(end.marks.ravel().tolist()):
            if mark:
                fill = color if mark >> HEAD & 1 else FAINT
                card.mark(left + j * CELL, y, CELL, shape[0] * CELL, fill)
    words = f"the parameter {_shown(shape)}"
    card.text(MIDDLE, y + shape[0] * CELL + 13, words)
    said = ("times gamma^alpha", "times gamma^(1-alpha)")
    for x, words, (name, color) in zip(SIDES, said, QUERY_AND_KEY, strict=True):
        x += -32 if x < MIDDLE else 32
        card.text(x, y + 20, f"its {name}", bold=True, color=color)
        card.text(x, y + 40, words)


def _draw_arrow(card: Card, x: float, row: int, to: float, next_row: int) -> None:
    start = _y(row) + LENGTH * CELL + 24
    card.arrow(x, start, to, _y(next_row) - 5)


def _draw_legend(card: Card, y: float) -> None:
    card.line(24, y - 18, WIDTH - 24, y - 18, color=FAINT)
    own = [color for _, color in QUERY_AND_KEY]
    said = ((own, "the head"), ([FAINT], "other heads"), (["#ffffff"], "no head"))
    x = 24
    for fills, words in said:
        for fill in fills:
            card.box(x, y - 6, CELL, CELL, fill=fill, stroke=FAINT, radius=1)
            x += CELL
        card.text(x + 6, y, words, anchor="start", color=GRAY)
        x += 22 + 7.5 * len(words)
    words = "a rectangle: one entry of the marks"
    card.text(WIDTH - 24, y, words, anchor="end", color=GRAY)


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"

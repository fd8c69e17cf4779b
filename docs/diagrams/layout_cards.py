"""One card for each layout: the blocks that devices hold, the matrices they iterate."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from card import ACCENT, Card, COLORS, GRAY, PALE
from jax.sharding import PartitionSpec as P
from mesh_plan import Leaf, Matrix, Plan


CELL, GAP, MARGIN = 216, 12, 24
COLUMN = 50  # of a matrix in a cell
SIDES = {"square": (24, 24), "wide": (44, 24)}  # width and height of a matrix
ROW = 48  # of matrices
TOP, HEIGHT, BAND = 62, 134, 84
Kinds = Mapping[str, str]  # square or wide, for each leaf


class Layout(NamedTuple):
    title: str
    mesh: Mapping[str, int]
    specs: Mapping[str, P]  # of a leaf of 4 square matrices and of one of 4 wide ones
    processes: int = 1


LAYOUTS = {
    "data": Layout(
        "Data parallel: every device holds everything",
        {"data": 4},
        {"query": P(), "up": P()},
    ),
    "fsdp": Layout(
        "FSDP: every device holds a quarter of each matrix",
        {"fsdp": 4},
        {"query": P(None, "fsdp"), "up": P(None, "fsdp")},
    ),
    "fsdp_tensor": Layout(
        "FSDP x tensor: matrices are cut along both sides",
        {"fsdp": 2, "tensor": 2},
        {"query": P(None, "fsdp", "tensor"), "up": P(None, "fsdp", "tensor")},
    ),
    "experts": Layout(
        "Experts x FSDP: each pair of devices holds experts of its own",
        {"expert": 2, "fsdp": 2},
        {"query": P(None, "fsdp"), "experts": P("expert", "fsdp")},
    ),
    "stages": Layout(
        "Stages x FSDP: each pair of devices holds layers of its own",
        {"stage": 2, "fsdp": 2},
        {"query": P("stage", "fsdp"), "up": P("stage", "fsdp")},
    ),
    "processes": Layout(
        "Two processes: copies in each, FSDP within",
        {"data": 2, "fsdp": 2},
        {"query": P(None, "fsdp"), "up": P(None, "fsdp")},
        processes=2,
    ),
}
NOTHING = "nothing is sent"
SHAPES = {"square": (4, 512, 512), "wide": (4, 512, 1024)}


def layout_card(layout: Layout) -> Card:
    kinds = dict(zip(layout.specs, SHAPES, strict=True))
    leaves = [Leaf(x, SHAPES[kind], layout.specs[x]) for x, kind in kinds.items()]
    plan = Plan(layout.mesh, leaves)
    width = 2 * MARGIN + 4 * CELL + 3 * GAP
    height = TOP + 2 * HEIGHT + BAND + (12 if layout.processes == 1 else 26)
    card = Card(width, height, layout.title)
    _draw_processes(card, layout.processes)
    for device in range(4):
        x = MARGIN + device * (CELL + GAP)
        _draw_held(card, plan, kinds, device, x)
        _draw_owned(card, plan, kinds, device, x, TOP + HEIGHT + BAND)
    _draw_exchanges(card, plan)
    return card


def _draw_processes(card: Card, count: int) -> None:
    if count == 1:
        return
    wide = 4 // count * (CELL + GAP) - GAP
    for i in range(count):
        x, height = MARGIN + i * (wide + GAP), 2 * HEIGHT + BAND + 28
        card.box(x - 5, TOP - 17, wide + 10, height, stroke=ACCENT, dashed=True)
        bottom = TOP + height - 28
        card.text(x + wide / 2, bottom, f"process {i}", bold=True, color=ACCENT)


def _draw_held(card: Card, plan: Plan, kinds: Kinds, device: int, x: float) -> None:
    card.box(x, TOP - 12, CELL, HEIGHT, fill=PALE)
    places = ", ".join(f"{k} {v}" for k, v in plan.coordinates(device).items())
    _name_rows(card, plan, x, TOP + 20)
    card.text(x + 8, TOP + 2, f"device {device}", anchor="start", bold=True)
    card.text(x + CELL - 8, TOP + 2, places, anchor="end", color=GRAY)
    held = {block.matrix: block for block in plan.held(device)}
    for leaf, matrix, left, top in _places(plan, x, TOP + 20):
        width, height = SIDES[kinds[leaf.name]]
        card.box(left, top, width, height, radius=1, fill="#ffffff")
        if block := held.get(matrix):
            (first, last), (start, end) = block.rows, block.columns
            card.mark(
                left + start * width,
                top + first * height,
                (end - start) * width,
                (last - first) * height,
                COLORS[matrix.number],
            )


def _draw_owned(
    card: Card, plan: Plan, kinds: Kinds, device: int, x: float, y: float
) -> None:
    card.box(x, y - 12, CELL, HEIGHT, fill=PALE)
    _name_rows(card, plan, x, y + 20)
    card.text(x + 8, y + 2, f"device {device} iterates", anchor="start")
    owned = set(plan.owned(device))
    for leaf, matrix, left, top in _places(plan, x, y + 20):
        width, height = SIDES[kinds[leaf.name]]
        if matrix in owned:
            card.mark(left, top, width, height, COLORS[matrix.number])
        else:
            card.box(left, top, width, height, radius=1, dashed=True)


def _places(
    plan: Plan, x: float, y: float
) -> Iterator[tuple[Leaf, Matrix, float, float]]:
    """Where the matrices of each leaf stand in the cell of a device."""
    for row, leaf in enumerate(plan.leaves):
        top = y + 14 + row * ROW
        for number in range(leaf.shape[0]):
            matrix = Matrix(leaf.name, number)
            yield leaf, matrix, x + 10 + number * COLUMN, top


def _name_rows(card: Card, plan: Plan, x: float, y: float) -> None:
    for row, leaf in enumerate(plan.leaves):
        place = x + 10, y + 5 + row * ROW
        card.text(*place, leaf.name, anchor="start", mono=True, color=GRAY)


def _draw_exchanges(card: Card, plan: Plan) -> None:
    there, back = exchanges_of(plan)
    y, right = TOP + HEIGHT + BAND / 2 - 12, card.width - MARGIN
    _draw_lines(card, MARGIN + 32, y, "start", ["to the owners", *there])
    _draw_lines(card, right - 32, y, "end", ["back", *back])
    if NOTHING not in there:
        card.arrow(MARGIN + 14, y - 26, MARGIN + 14, y + 26)
    if NOTHING not in back:
        card.arrow(right - 14, y + 26, right - 14, y - 26)


def _draw_lines(card: Card, x: float, y: float, anchor: str, lines: list[str]) -> None:
    for i, line in enumerate(lines):
        at = y + 17 * (i - (len(lines) - 1) / 2)
        card.text(x, at, line, anchor=anchor, bold=not i)


def exchanges_of(plan: Plan) -> tuple[list[str], list[str]]:
    """The collectives before and after the iteration, a line for each kind."""
    there: dict[str, list[str]] = {}
    back: dict[str, list[str]] = {}
    for _, stack, cut, _ in plan.stacks:
        names = " and ".join(plan.leaves[i].name for i, _ in stack.parts)
        if cut.sharded:
            kind = f"all-to-all over {' and '.join(cut.sharded)}"
            for way in (there, back):
                way.setdefault(kind, []).append(names)
        if cut.replicated:
            kind = f"all-gather over {' and '.join(cut.replicated)}"
            back.setdefault(kind, []).append(names)
    return _lines(there), _lines(back)


def _lines(way: dict[str, list[str]]) -> list[str]:
    lines = [f"{kind}: {', '.join(names)}" for kind, names in way.items()]
    return lines or [NOTHING]

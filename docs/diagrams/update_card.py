"""The way of the data through an update, and the folders of the package it passes."""

from card import ACCENT, Card, GREY, PALE


WIDTH, HEIGHT, LEFT, PITCH = 124, 46, 24, 150
ROWS = {"one": 100, "main": 131, "mesh": 162, "adam": 254, "clip": 340, "out": 414}

#: Column, row, what happens, and the folder where it does.
BOXES = {
    "gradients": (0, "main", "gradients", ""),
    "momentum": (1, "main", "momentum", "_muon"),
    "matrices": (2, "main", "matrices", "_parameters"),
    "one": (3, "one", "stacks by shape", "_matrices"),
    "mesh": (3, "mesh", "to the owners", "_mesh"),
    "solver": (4, "main", "Newton-Schulz", "_newton_schulz"),
    "scale": (5, "main", "scale by shape", "_muon"),
    "adam": (1, "adam", "Adam", "optax"),
    "rate": (5, "adam", "decay, rate", "_muon, optax"),
    "activations": (0, "clip", "activations", ""),
    "attention": (1, "clip", "largest logits", "_attention"),
    "row": (2, "clip", "row of heads", "_qk_clip"),
    "gamma": (3, "clip", "gamma", "_qk_clip"),
    "scales": (4, "clip", "a scale per leaf", "_qk_clip, _model"),
    "clip": (5, "clip", "QK-Clip", "_qk_clip"),
    "updates": (5, "out", "updates", ""),
}
ACROSS = [
    *[("gradients", "momentum"), ("momentum", "matrices"), ("solver", "scale")],
    *[("adam", "rate"), ("activations", "attention"), ("attention", "row")],
    *[("row", "gamma"), ("gamma", "scales"), ("scales", "clip")],
]
DOWN = [("scale", "rate"), ("rate", "clip"), ("clip", "updates")]


def update_card() -> Card:
    title = "One update, and where its parts are"
    card = Card(2 * LEFT + 5 * PITCH + WIDTH, ROWS["out"] + 48, title)
    card.text(LEFT, 26, title, size=16, anchor="start", bold=True)
    for column, row, words, folder in BOXES.values():
        _draw_box(card, _left(column), ROWS[row], words, folder)
    for start, end in ACROSS:
        card.arrow(_right_of(start), _y(start), _left_of(end), _y(end))
    for start, end in DOWN:
        x = _left_of(start) + WIDTH / 2
        card.arrow(x, _y(start) + HEIGHT / 2, x, _y(end) - HEIGHT / 2)
    _draw_forks(card)
    return card


def _draw_box(card: Card, x: float, y: float, words: str, folder: str) -> None:
    card.box(x, y - HEIGHT / 2, WIDTH, HEIGHT, fill=PALE if folder else "#ffffff")
    x += WIDTH / 2
    if not folder:
        card.text(x, y, words, bold=True)
        return
    card.text(x, y - 9, words, bold=True, size=12.5)
    card.text(x, y + 10, folder, size=11, mono=True, colour=ACCENT)


def _draw_forks(card: Card) -> None:
    for name in ("one", "mesh"):
        start, end = _right_of("matrices"), _left_of(name)
        card.arrow(start, _y("matrices"), end, _y(name))
        card.arrow(_right_of(name), _y(name), _left_of("solver"), _y("solver"))
    x = _left_of("gradients") + WIDTH / 2
    bottom = _y("gradients") + HEIGHT / 2
    card.arrow(x, bottom, x, _y("adam"), _left_of("adam"), _y("adam"))
    words = "other leaves"
    card.text(x + 8, _y("adam") - 12, words, size=11, colour=GREY, anchor="start")
    x = _left_of("one") + WIDTH / 2
    card.text(x, _y("one") - 34, "one device", size=11, colour=GREY)
    card.text(x, _y("mesh") + 34, "a mesh", size=11, colour=GREY)


def _left(column: int) -> float:
    return LEFT + column * PITCH


def _left_of(name: str) -> float:
    return _left(BOXES[name][0])


def _right_of(name: str) -> float:
    return _left_of(name) + WIDTH


def _y(name: str) -> float:
    return ROWS[BOXES[name][1]]

"""The way of the data through an update, drawn from one.

An update is walked through, on one device and on a mesh, and each box shows the folder
of the function that does what it says. A function that no update enters is an error.
"""

import functools
import os
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from card import ACCENT, Card, GRAY, PALE
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import muonclip_jax as mc


WIDTH, HEIGHT, LEFT, PITCH = 138, 50, 16, 158
ROWS = {"one": 98, "main": 131, "mesh": 164, "adam": 254, "clip": 340, "out": 414}

#: Column, row, what happens, and the functions that do it; "optax" does the rest.
BOXES = {
    "gradients": (0, "main", "gradients", ()),
    "momentum": (1, "main", "momentum", ("_accumulate",)),
    "matrices": (2, "main", "matrices", ("views_of",)),
    "one": (3, "one", "stacks by shape", ("plan_stacks",)),
    "mesh": (3, "mesh", "to the owners", ("exchanged",)),
    "solver": (4, "main", "Newton-Schulz", ("Polynomials.iterate",)),
    "scale": (5, "main", "scale by shape", ("Direction._scale",)),
    "adam": (1, "adam", "Adam", ("optax",)),
    "rate": (5, "adam", "decay, rate", ("decayed_weights", "optax")),
    "activations": (0, "clip", "activations", ()),
    "attention": (1, "clip", "largest logits", ("max_logits",)),
    "row": (2, "clip", "row of heads", ("Heads.read",)),
    "gamma": (3, "clip", "gamma", ("ClipRule.gamma",)),
    "scales": (4, "clip", "a scale per leaf", ("Heads.scales", "OwnedLeaf.spread")),
    "clip": (5, "clip", "QK-Clip", ("_scale_update",)),
    "updates": (5, "out", "updates", ()),
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
    folders = folders_entered()
    for column, row, words, functions in BOXES.values():
        found = dict.fromkeys(folders[name] for name in functions)
        _draw_box(card, _left(column), ROWS[row], words, ", ".join(found))
    for start, end in ACROSS:
        card.arrow(_right_of(start), _y(start), _left_of(end), _y(end))
    for start, end in DOWN:
        x = _left_of(start) + WIDTH / 2
        card.arrow(x, _y(start) + HEIGHT / 2, x, _y(end) - HEIGHT / 2)
    _draw_forks(card)
    return card


@functools.cache
def folders_entered() -> dict[str, str]:
    """The folder of each function that an update enters; "optax" is its own."""
    kernel = jnp.ones((16, 4, 4))
    params = {"attn": {name: {"kernel": kernel} for name in ("query", "key")}}
    activations = jnp.ones((1, 5, 4, 4))
    tx = mc.muonclip(1e-3)
    state = tx.init(params)

    def on_one_device() -> None:
        stats = {"attn": {"max_logits": mc.max_logits(activations, activations)}}
        tx.update(params, state, params, attention_stats=stats)

    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    leaf = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sharded)
    shared = mc.muon(1e-3, shardings=sharded)

    def on_a_mesh() -> None:
        jax.eval_shape(shared.update, leaf, jax.eval_shape(shared.init, leaf), leaf)

    return {"optax": "optax", **_entered(on_one_device), **_entered(on_a_mesh)}


def _entered(run: Callable[[], None]) -> dict[str, str]:
    root, found = os.path.dirname(mc.__file__), {}

    def note(frame, event, argument) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            inside = os.path.relpath(code.co_filename, root)
            found[code.co_qualname] = os.path.dirname(inside)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _draw_box(card: Card, x: float, y: float, words: str, folder: str) -> None:
    card.box(x, y - HEIGHT / 2, WIDTH, HEIGHT, fill=PALE if folder else "#ffffff")
    x += WIDTH / 2
    if not folder:
        card.text(x, y, words, bold=True)
        return
    card.text(x, y - 10, words, bold=True)
    card.text(x, y + 11, folder, color=ACCENT)


def _draw_forks(card: Card) -> None:
    for name in ("one", "mesh"):
        start, end = _right_of("matrices"), _left_of(name)
        card.arrow(start, _y("matrices"), end, _y(name))
        card.arrow(_right_of(name), _y(name), _left_of("solver"), _y("solver"))
    x = _left_of("gradients") + WIDTH / 2
    bottom = _y("gradients") + HEIGHT / 2
    card.arrow(x, bottom, x, _y("adam"), _left_of("adam"), _y("adam"))
    words = "other leaves"
    card.text(x + 8, _y("adam") - 38, words, color=GRAY, anchor="start")
    x = _left_of("one") + WIDTH / 2
    card.text(x, _y("one") - 36, "one device", color=GRAY)
    card.text(x, _y("mesh") + 36, "a mesh", color=GRAY)


def _left(column: int) -> float:
    return LEFT + column * PITCH


def _left_of(name: str) -> float:
    return _left(BOXES[name][0])


def _right_of(name: str) -> float:
    return _left_of(name) + WIDTH


def _y(name: str) -> float:
    return ROWS[BOXES[name][1]]

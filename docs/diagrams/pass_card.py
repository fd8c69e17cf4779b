"""The passes of five steps: each begins with X X^T and ends with a product with X."""

from card import ACCENT, Card, COLORS, GRAY, PALE
from internals import collected

from muonclip_jax import NS_COEFFS


STEP, LEFT, TOP, ROW = 34, 212, 66, 58


def pass_card() -> Card:
    schedule = NS_COEFFS["keller"]
    rows = {
        "standard": [(triple,) for triple in schedule],
        "Gram, float32": collected(schedule, "float32"),
        "Gram, 16 bits": collected(schedule, "bfloat16"),
    }
    title = "Five steps of Newton-Schulz in passes"
    card = Card(912, TOP + 3 * ROW + 44, title)
    for i, (name, passes) in enumerate(rows.items()):
        y = TOP + i * ROW
        card.text(24, y + 17, name, anchor="start", bold=True)
        _draw_passes(card, [len(steps) for steps in passes], y)
    _draw_legend(card, TOP + 3 * ROW + 8)
    return card


def _draw_passes(card: Card, lengths: list[int], y: float) -> None:
    x, step = LEFT, 1
    for length in lengths:
        width = 2 * STEP + length * STEP + 10
        card.box(x, y - 6, width, STEP + 12, fill=PALE)
        _draw_product(card, x + 5, y)
        for _ in range(length):
            x += STEP
            card.box(x + 7, y + 2, STEP - 4, STEP - 4, fill="#ffffff", stroke=ACCENT)
            card.text(x + 5 + STEP / 2, y + STEP / 2, str(step), color=ACCENT)
            step += 1
        _draw_product(card, x + 5 + STEP, y)
        x += 2 * STEP + 18


def _draw_product(card: Card, x: float, y: float) -> None:
    card.mark(x, y + 9, STEP - 4, STEP - 18, COLORS[1])


def _draw_legend(card: Card, y: float) -> None:
    _draw_product(card, LEFT, y - 7)
    words = "a product with the long side: first R = X Xᵀ, last X ← Q X"
    card.text(LEFT + STEP + 4, y + 10, words, anchor="start", color=GRAY)
    x = LEFT + 480
    card.box(x, y - 2, 24, 24, fill="#ffffff", stroke=ACCENT)
    card.text(x + 34, y + 10, "a step on R", anchor="start", color=GRAY)

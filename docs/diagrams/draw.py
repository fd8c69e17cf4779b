"""Draws the diagrams of the manual, of the package's own plans and figures.

python docs/diagrams/draw.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
from card import Card
from clip_card import clip_card
from layout_cards import layout_card, LAYOUTS
from pass_card import pass_card
from reading_card import reading_card
from share_card import share_card
from update_card import update_card


HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    for name, card in cards().items():
        (args.out / f"{name}.svg").write_text(card.svg())


def cards() -> dict[str, Card]:
    layouts = {name: layout_card(layout) for name, layout in LAYOUTS.items()}
    return layouts | {
        "update": update_card(),
        "passes": pass_card(),
        "shares": share_card(),
        "clip": clip_card(),
        "reading": reading_card(),
    }


if __name__ == "__main__":
    main()

"""Pairs of low-rank factors: `(in..., rank)` and `(rank, out...)`, as LoRA has them."""

import re
from collections.abc import Callable

from .attention_shapes import Sides
from .paths import Path
from .stack_axes import Shape


def low_rank_sides(path: Path, shape_of: Callable[[Path], Shape]) -> Sides | None:
    """Inputs and outputs of a factor whose partner has the same rank at its end."""
    for depth in range(max(0, len(path) - 2), len(path)):
        found = re.fullmatch(r"(.*lora_?)([abAB])", path[depth])
        if found:
            beginning, letter = found.groups()
            other = chr(ord(letter) ^ 3)  # a for b, B for A
            partner = (*path[:depth], beginning + other, *path[depth + 1 :])
            shapes = shape_of(path), shape_of(partner)
            is_first = letter in "aA"
            return _sides(*(shapes if is_first else shapes[::-1]), is_first)
    return None


def _sides(first: Shape, second: Shape, is_first: bool) -> Sides | None:
    own = first if is_first else second
    if not first or not second:
        return None
    stack = 0 if first[-1] == second[0] else 1
    if first[:stack] != second[:stack] or first[-1] != second[stack]:
        return None
    axes = tuple(range(stack - len(own), 0))
    return (axes[:-1], axes[-1:]) if is_first else (axes[:1], axes[1:])

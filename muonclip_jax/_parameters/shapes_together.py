"""Leaves that their names pair with others, where the shapes together tell the axes.

Low-rank factors are `(in..., rank)` and `(rank, out...)`, as LoRA has them. Gemma's
`q_einsum` is `(heads, features, head_dim)`, `kv_einsum` `(2, key_heads, features,
head_dim)` and `attn_vec_einsum` `(heads, head_dim, features)`; its `gating_einsum` is a
pair of kernels, turned or not as the `linear` behind it says.
"""

import re
from collections.abc import Callable

from .attention_shapes import Sides
from .paths import Path
from .stack_axes import Shape


_INPUTS = {"q_einsum": 3, "k_einsum": 3, "kv_einsum": 4, "qkv_einsum": 4}


def low_rank_sides(path: Path, shape_of: Callable[[Path], Shape]) -> Sides | None:
    """Inputs and outputs of a factor whose partner has the same rank at its end."""
    found = low_rank_partner(path)
    if found is None:
        return None
    partner, is_first = found
    return _sides_of_factor(shape_of(path), shape_of(partner), is_first)


def low_rank_partner(path: Path) -> tuple[Path, bool] | None:
    """The other factor by its name, and whether this is the one that takes inputs."""
    for depth in range(max(0, len(path) - 2), len(path)):
        found = re.fullmatch(r"(.*lora_?)([abAB])", path[depth])
        if found:
            beginning, letter = found.groups()
            other = chr(ord(letter) ^ 3)  # a for b, B for A
            partner = (*path[:depth], beginning + other, *path[depth + 1 :])
            return partner, letter in "aA"
    return None


def _sides_of_factor(own: Shape, partner: Shape, is_first: bool) -> Sides | None:
    first, second = (own, partner) if is_first else (partner, own)
    if not first or not second:
        return None
    stack = 0 if first[-1] == second[0] else 1
    if first[:stack] != second[:stack] or [first[-1]] != list(
        second[stack : stack + 1]
    ):
        return None
    axes = tuple(range(stack - len(own), 0))
    return (axes[:-1], axes[-1:]) if is_first else (axes[:1], axes[1:])


def gemma_sides(path: Path, shape_of: Callable[[Path], Shape]) -> Sides | None:
    """Inputs and outputs of a leaf, if the shapes beside it fit the names."""
    is_kernel = path[-1:] == ("kernel",)
    module, name = (path[:-2], path[-2:-1]) if is_kernel else (path[:-1], path[-1:])
    if not name:
        return None
    below = {
        other: shape_of((*module, other, "kernel")) or shape_of((*module, other))
        for other in (*_INPUTS, "attn_vec_einsum", "gating_einsum", "linear")
    }
    if name[0] == "gating_einsum":
        return _of_gate(below["gating_einsum"], below["linear"])
    out = below["attn_vec_einsum"]
    if len(out) != 3 or out[-1] == out[-2]:
        return None
    heads, head_dim, features = out
    inner = features, head_dim
    if name[0] in _INPUTS:
        fits = below[name[0]][-2:] == inner and len(below[name[0]]) == _INPUTS[name[0]]
        return ((-2,), (-3, -1)) if fits else None
    queries = below["q_einsum"] or below["qkv_einsum"][1:]
    is_out = name[0] == "attn_vec_einsum" and queries == (heads, *inner)
    return ((-3, -2), (-1,)) if is_out else None


def _of_gate(gate: Shape, linear: Shape) -> Sides | None:
    if len(gate) != 3 or len(linear) != 2:
        return None
    if gate[-2:] == linear:
        return (-1,), (-2,)
    return ((-2,), (-1,)) if gate[-2:] == linear[::-1] else None

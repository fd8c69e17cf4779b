"""Kernels of one module, taken apart by their shapes together: attention, gates."""

import math
from collections.abc import Iterable

from . import names
from .names import Leaf
from .paths import Path


def layouts_of(leaves: Iterable[Leaf]) -> dict[Path, tuple[str, list[str]]]:
    """The role of every kernel that a layout may name, and the letters that fit it.

    Several if layouts fit that take the kernel apart differently.
    """
    modules: dict[Path, dict[str, Leaf]] = {}
    for leaf in leaves:
        at = len(leaf.path) - 1 - leaf.is_kernel
        name = "".join(leaf.path[at : at + 1])
        if name in names.ROLES and leaf.shape:
            modules.setdefault(leaf.path[:at], {})[name] = leaf
    found: dict[Path, tuple[str, list[str]]] = {}
    for members in modules.values():
        fitting: dict[int, list[dict[str, str]]] = {}
        is_general = max(len(leaf.shape) for leaf in members.values()) > 2
        for layout in names.LAYOUTS if is_general else ():
            if not members.keys() <= layout.keys():
                continue
            pairs = [(layout[role], leaf.shape) for role, leaf in members.items()]
            # A bias has the outputs of its kernel, and its layers.
            pairs += [
                ("".join(x for x in layout[role] if not x.islower()), leaf.bias)
                for role, leaf in members.items()
                if leaf.bias and leaf.is_kernel
            ]
            size: dict[str, int] = {}
            fits = all(len(letters) == len(shape) for letters, shape in pairs)
            fits = fits and all(
                size.setdefault(x, int(x) if x.isdigit() else n) == n
                for letters, shape in pairs
                for x, n in zip(letters.upper(), shape, strict=True)
            )
            for whole, *parts in ("MNV", "NKG"):
                if fits and {whole, *parts} <= size.keys():
                    fits = size[whole] == math.prod(size[x] for x in parts)
            # Most outputs are as wide as what came in. Features as many as heads hold
            # would be a coincidence in a stack; and in Flax a query without a value has
            # heads.
            features, heads = size.get("D", 0), size.get("N", 0)
            of_width = size.get("E", features) == features
            is_likely = features == heads * size.get("H", 0)
            is_likely |= "value" not in members and features >= heads
            is_likely &= "L" not in "".join(layout.values())
            if fits:
                likely = of_width + (of_width and is_likely)
                fitting.setdefault(likely, []).append(layout)
        likeliest = fitting[max(fitting)] if fitting else []
        for role, leaf in members.items():
            letters = {sides_of(x): x for x in (layout[role] for layout in likeliest)}
            found[leaf.path] = role, list(letters.values())
    return found


def sides_of(letters: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Input and output axes of a kernel in a layout, from the end."""
    axes = [(i - len(letters), x) for i, x in enumerate(letters) if x != "L"]
    return (
        tuple(i for i, x in axes if x.islower()),
        tuple(i for i, x in axes if x.isupper()),
    )

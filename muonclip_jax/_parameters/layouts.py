"""Kernels of one module, taken apart by their shapes together: attention, gates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .layers import Leaf
from .paths import Path


#: The kernels of one attention, a letter for each axis, small for inputs; one letter
#: is one size. D, C, R, S are features or ranks that come in (of the query, of what is
#: attended to, of latents), E what goes out; M = N * V is flat, N = K * G heads are in
#: groups. L and digits stack.
LAYOUTS: tuple[Mapping[str, str], ...] = (
    # Flax, HuggingFace's Llama in bonsai and tunix; cross attention has its own C.
    dict(query="dNH", key="cKH", value="cKV", out="nvE"),
    dict(query="dNH", key="cKH", value="cKV", out="mE"),  # DeepSeek's flat output
    dict(query="dNH", key="cKH", value="cKV", out="Dnv"),  # praxis, simply
    dict(query="dKGH", key="dKH", value="dKV", out="kgvE"),  # penzai
    dict(query="dKGH", key="dKH", value="dKV", out="nvE"),  # Levanter
    # Latent attention in MaxText, with a low-rank query and without.
    dict(wq_b="rNH", wkv_b="sNW", out="nvE"),
    dict(wq_b="rNH", wkv_b="sNW", out="mE"),
    dict(query="dNH", wkv_b="sNW", out="nvE"),
    # `nn.scan` over plain kernels, and over kernels with heads.
    dict(query="LdQ", key="LdP", value="LdU", out="LqE"),
    dict(query="LdNH", key="LdKH", value="LdKV", out="LnvE"),
    dict(query="LdNH", key="LdKH", value="LdKV", out="LmE"),
    dict(wq_b="LrNH", wkv_b="LsNW", out="LmE"),
    # Gemma's einsums.
    dict(q_einsum="NdH", kv_einsum="2KdH", attn_vec_einsum="nhD"),
    dict(gating_einsum="2dF", linear="fD"),  # is stored both ways round
    dict(gating_einsum="2Fd", linear="fD"),
)


class Sides(NamedTuple):
    """Axes of inputs and of outputs, of those of one layer."""

    inputs: Sequence[int]
    outputs: Sequence[int]


#: Roles whose outputs have heads, which `per_head` cuts.
WITH_HEADS = {"query", "key", "value", "wq_b", "wkv_b"}
ATTENTION = WITH_HEADS | {"out"}
_ROLES = {role for layout in LAYOUTS for role in layout}


def layouts_of(leaves: Iterable[Leaf]) -> dict[Path, tuple[str, tuple[str, ...]]]:
    """The role of every kernel that a layout may name, and the letters that fit it.

    Several if layouts fit that take the kernel apart differently.
    """
    modules: dict[Path, dict[str, Leaf]] = {}
    for leaf in leaves:
        at = len(leaf.path) - 1 - leaf.is_kernel
        name = "".join(leaf.path[at : at + 1])
        if name in _ROLES and leaf.shape:
            modules.setdefault(leaf.path[:at], {})[name] = leaf
    found: dict[Path, tuple[str, tuple[str, ...]]] = {}
    for members in modules.values():
        fitting = [layout for layout in LAYOUTS if _fits(layout, members)]
        for role, leaf in members.items():
            letters = {sides_of(layout[role]): layout[role] for layout in fitting}
            # A name by itself, such as `linear`, is no role unless its shape fits.
            is_role = bool(fitting) or len(members) > 1
            found[leaf.own] = role * is_role, tuple(letters.values())
    return found


def _fits(layout: Mapping[str, str], members: Mapping[str, Leaf]) -> bool:
    """Checks that one letter is one size, whichever kernels have it."""
    if not members.keys() <= layout.keys() or members.keys() <= {"out", "linear"}:
        return False
    # Features as many as heads hold would be a coincidence in a stack; and in Flax a
    # query without a value has heads, fewer than features.
    features, *heads = (members.get("query") or next(iter(members.values()))).shape
    has_heads = features == math.prod(heads)
    has_heads |= "value" not in members and features >= max(heads[:1], default=0)
    if has_heads and "L" in "".join(layout.values()):
        return False
    if max(leaf.rank for leaf in members.values()) < 3:
        return False
    pairs = [(layout[role], leaf.shape) for role, leaf in members.items()]
    # A bias has the outputs of its kernel, and its layers.
    pairs += [
        ("".join(x for x in layout[role] if not x.islower()), leaf.bias)
        for role, leaf in members.items()
        if leaf.bias
    ]
    if any(len(letters) != len(shape) for letters, shape in pairs):
        return False
    sizes: dict[str, set[int]] = {}
    for letters, shape in pairs:
        for letter, n in zip(letters.upper(), shape, strict=True):
            sizes.setdefault(letter, {int(letter)} if letter.isdigit() else set()).add(
                n
            )
    size = {letter: math.prod(found) for letter, found in sizes.items()}
    wholes = [x for x in ("MNV", "NKG") if {*x} <= size.keys()]
    return all(len(found) == 1 for found in sizes.values()) and all(
        size[whole] == math.prod(size[x] for x in parts) for whole, *parts in wholes
    )


def sides_of(letters: str) -> Sides:
    """Input and output axes of a kernel in a layout, from the end."""
    axes = [(i - len(letters), x) for i, x in enumerate(letters) if x != "L"]
    return Sides(
        tuple(i for i, x in axes if x.islower()),
        tuple(i for i, x in axes if x.isupper()),
    )

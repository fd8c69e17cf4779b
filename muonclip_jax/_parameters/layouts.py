"""Kernels of one module, taken apart by their shapes together: attention, gates."""

import math
from collections.abc import Iterable, Mapping

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
    dict(query="dNH", key="cKH", value="cKV", out="Env"),  # praxis, simply
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
        fits = [(_fit(layout, members), layout) for layout in LAYOUTS]
        best = max(fit for fit, _ in fits)
        likeliest = [layout for fit, layout in fits if fit == best > 0]
        for role, leaf in members.items():
            letters = {sides_of(layout[role]): layout[role] for layout in likeliest}
            found[leaf.own] = role * (len(members) > 1), tuple(letters.values())
    return found


def _fit(layout: Mapping[str, str], members: Mapping[str, Leaf]) -> int:
    """How likely a layout is, 0 if it does not fit: one letter has to be one size."""
    if not members.keys() <= layout.keys():
        return 0
    if max(leaf.rank for leaf in members.values()) < 3:
        return 0
    pairs = [(layout[role], leaf.shape) for role, leaf in members.items()]
    # A bias has the outputs of its kernel, and its layers.
    pairs += [
        ("".join(x for x in layout[role] if not x.islower()), leaf.bias)
        for role, leaf in members.items()
        if leaf.bias
    ]
    if any(len(letters) != len(shape) for letters, shape in pairs):
        return 0
    size: dict[str, int] = {}
    for letters, shape in pairs:
        for letter, n in zip(letters.upper(), shape, strict=True):
            if size.setdefault(letter, int(letter) if letter.isdigit() else n) != n:
                return 0
    for whole, *parts in ("MNV", "NKG"):
        if {whole, *parts} <= size.keys():
            if size[whole] != math.prod(size[x] for x in parts):
                return 0
    # Most outputs are as wide as what came in. Features as many as heads hold would be
    # a coincidence in a stack; and in Flax a query without a value has heads.
    features, heads = size.get("D", 0), size.get("N", 0)
    if size.get("E", features) != features:
        return 1
    is_likely = features == heads * size.get("H", 0)
    is_likely |= "value" not in members and features >= heads
    return 2 + (is_likely and "L" not in "".join(layout.values()))


def sides_of(letters: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Input and output axes of a kernel in a layout, from the end."""
    axes = [(i - len(letters), x) for i, x in enumerate(letters) if x != "L"]
    return (
        tuple(i for i, x in axes if x.islower()),
        tuple(i for i, x in axes if x.isupper()),
    )

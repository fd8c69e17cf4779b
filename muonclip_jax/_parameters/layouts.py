"""Kernels of one module, taken apart by their shapes together: attention, gates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .flax_leaves import FlaxLeaf
from .paths import Path


#: The kernels of one attention. A letter stands for each axis: lower case for an input,
#: upper case for an output; `n` and `N` are the same size. D, C, R, S are features or
#: ranks that come in (of the query, of what is attended to, of latents), E what goes
#: out; M = N * V is flat, N = K * G heads are in groups. L and digits are axes that
#: stack; where a layout has neither, an axis L may be in front.
LAYOUTS: tuple[Mapping[str, str], ...] = (
    # Flax, HuggingFace's Llama in bonsai and tunix; cross attention has its own C.
    dict(query="dNH", key="cKH", value="cKV", out="nvE"),
    dict(query="dNH", key="cKH", value="cKV", out="mE"),  # DeepSeek's flat output
    dict(query="dNH", key="cKH", value="cKV", out="Dnv"),  # praxis, simply
    dict(query="dKGH", key="dKH", value="dKV", out="kgvE"),  # penzai
    dict(query="dKGH", key="dKH", value="dKV", out="nvE"),  # Levanter
    dict(query="dQ", key="dP", value="dU", out="qE"),  # without heads
    # Latent attention in MaxText, with a low-rank query and without.
    dict(wq_b="rNH", wkv_b="sNW", out="nvE"),
    dict(wq_b="rNH", wkv_b="sNW", out="mE"),
    dict(query="dNH", wkv_b="sNW", out="nvE"),
    # Gemma's einsums.
    dict(q_einsum="NdH", kv_einsum="2KdH", attn_vec_einsum="nhD"),
    dict(gating_einsum="2dF", linear="fD"),  # is stored both ways round
    dict(gating_einsum="2Fd", linear="fD"),
)
_FLAT = [each for each in LAYOUTS if "G" not in each.get("query", "")]
LAYOUTS += tuple({role: f"L{x}" for role, x in each.items()} for each in _FLAT)


class LayerAxes(NamedTuple):
    """The axes of inputs and of outputs in one layer."""

    inputs: Sequence[int]
    outputs: Sequence[int]


DENSE = LayerAxes((-2,), (-1,))

#: Roles whose outputs have heads, which `per_head` cuts.
WITH_HEADS = {"query", "key", "value", "wq_b", "wkv_b"}
ATTENTION = WITH_HEADS | {"out"}
_LAYOUT_ROLES = {role for layout in LAYOUTS for role in layout}


def layouts_of(leaves: Iterable[FlaxLeaf]) -> dict[Path, dict[str, Any]]:
    """Returns the role of every kernel that a layout may name, and fitting letters.

    Several if layouts fit that take the kernel apart differently.
    """
    modules: dict[Path, dict[str, FlaxLeaf]] = {}
    for leaf in leaves:
        depth = len(leaf.path) - 1 - leaf.is_kernel
        name = "".join(leaf.path[depth : depth + 1])
        if name in _LAYOUT_ROLES and leaf.shape:
            modules.setdefault(leaf.path[:depth], {})[name] = leaf
    layouts: dict[Path, dict[str, Any]] = {}
    for members in modules.values():
        fitting = [layout for layout in LAYOUTS if _fits(layout, members)]
        for role, leaf in members.items():
            letters = {sides_of(layout[role]): layout[role] for layout in fitting}
            # A name by itself, such as `linear`, is no role unless its shape fits.
            is_role = bool(fitting) or len(members) > 1
            fields = dict(role=role if is_role else "", letters=tuple(letters.values()))
            layouts[leaf.tree_path] = fields
    return layouts


def _fits(layout: Mapping[str, str], members: Mapping[str, FlaxLeaf]) -> bool:
    """Checks that one letter is one size in all kernels."""
    if not members.keys() <= layout.keys() or members.keys() <= {"out", "linear"}:
        return False
    # If features equal heads times head_dim, the first axis is no stack; and in Flax a
    # query without a value has fewer heads than features.
    features, *heads = (members.get("query") or next(iter(members.values()))).shape
    has_heads = features == math.prod(heads)
    has_heads |= "value" not in members and features >= max(heads[:1], default=0)
    is_flat = max(leaf.rank for leaf in members.values()) < 3
    if is_flat or (has_heads and "L" in "".join(layout.values())):
        return False
    size: dict[str, int] = {}
    for role, leaf in members.items():
        # A bias has the outputs of its kernel, and its layers.
        outputs = "".join(x for x in layout[role] if not x.islower())
        for letters, shape in ((layout[role], leaf.shape), (outputs, leaf.bias)):
            if not shape:
                continue
            if len(letters) != len(shape):
                return False
            for x, n in zip(letters.upper(), shape, strict=True):
                if size.setdefault(x, int(x) if x.isdigit() else n) != n:
                    return False
    wholes = [x for x in ("MNV", "NKG") if {*x} <= size.keys()]
    return all(size[x[0]] == size[x[1]] * size[x[2]] for x in wholes)


def sides_of(letters: str) -> LayerAxes:
    """Returns input and output axes of a kernel in a layout, from the end."""
    axes = [(i - len(letters), x) for i, x in enumerate(letters) if x != "L"]
    inputs = tuple(i for i, x in axes if x.islower())
    return LayerAxes(inputs, tuple(i for i, x in axes if x.isupper()))

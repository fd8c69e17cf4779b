"""Attention layers that were read, as `AttentionLayer`, with paths for names."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._model.attention_layers import AttentionLayer
from .._model.head_leaf import HeadLeaf
from .._parameters import paths
from .head_layouts import head_leaf
from .layers import Layer
from .pieces import Shape


class NamedLayer(NamedTuple):
    """An attention layer by its path.

    **Arguments:**

    - `path`: the deepest module of all its leaves.
    - `layer`: as QK-Clip takes it; `None` where it cannot scale it.
    - `refusal`: why not, for people; else empty.
    - `heads`: of one layer of a stack.
    - `found`: what it was read from, several times where one layer is called often.
    """

    path: paths.Path
    layer: AttentionLayer | None
    refusal: str
    heads: int
    found: tuple[Layer, ...]


class AbsoluteLayer(AttentionLayer):
    """A layer whose leaves are named from the root: others lie in the same module."""

    def path_of(self, leaf: HeadLeaf) -> paths.Path:
        return paths.split(leaf.path)


def named_layers(
    layers: Sequence[Layer], leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> list[NamedLayer]:
    """Every layer once, however often the function calls it.

    A call of which nothing tells where the heads are is of the layer that has the same
    parameters, if there is one: its logits count, too.
    """
    told = [(layer, *_leaves(layer, leaf_paths, shapes)) for layer in layers]
    # Not by the leaves themselves: slices in them have no hash before Python 3.12.
    groups: dict[Any, list[tuple[Layer, Roles, str]]] = {}
    owners: dict[frozenset[int], Any] = {}
    for layer, roles, refusal in sorted(told, key=lambda x: bool(x[2])):
        key: Any = repr(roles), refusal, layer.line if refusal else ""
        if layer.parameters:
            key = owners.setdefault(layer.parameters, key)
        groups.setdefault(key, []).append((layer, roles, refusal))
    modules = [_module(group[0][0], leaf_paths) for group in groups.values()]
    clipped = [m for m, g in zip(modules, groups.values(), strict=True) if g[0][1]]
    return [
        _named(module, *group[0][1:], tuple(x for x, *_ in group), clipped)
        for module, group in zip(modules, groups.values(), strict=True)
    ]


Roles = tuple[tuple[HeadLeaf, ...], ...]


def _leaves(
    layer: Layer, leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> tuple[Roles, str]:
    """Query, key and what takes all, by paths from the root; or why there is none."""
    if layer.refusal:
        return (), layer.refusal
    groups = layer.query, layer.key, layer.whole
    if not layer.query:  # key heads for several queries each, which stay, are a key
        groups = layer.whole, layer.shared, ()
    roles = tuple(
        tuple(
            head_leaf(
                "/".join(leaf_paths[p.parameter]),
                shapes[p.parameter],
                p.pieces,
                p.dims,
                shared=not p.is_own and group is not layer.shared,
            )
            for p in group
        )
        for group in groups
    )
    # Several products of the same leaves scale them once.
    found = tuple(
        tuple(x for i, x in enumerate(r) if x is not None and x not in r[:i])
        for r in roles
    )
    is_told = all(None not in leaves for leaves in roles)
    if not is_told or any(x in (*found[0], *found[1]) for x in found[2]):
        return (), "its heads lie in a leaf as HeadLeaf cannot say"
    return found, ""


def _module(layer: Layer, leaf_paths: Sequence[paths.Path]) -> paths.Path:
    """The deepest that holds all leaves."""
    parts = (*layer.query, *layer.key, *layer.whole, *layer.shared)
    modules = [leaf_paths[p.parameter][:-1] for p in parts] or [()]
    same = itertools.takewhile(lambda x: len(set(x)) == 1, zip(*modules, strict=False))
    return tuple(part for part, *_ in same)


def _named(
    module: paths.Path,
    roles: Roles,
    refusal: str,
    group: tuple[Layer, ...],
    clipped: Sequence[paths.Path],
) -> NamedLayer:
    heads = group[0].heads
    if refusal:
        return NamedLayer(module, None, refusal, heads, group)
    if clipped.count(module) > 1:
        # The first leaf's path is the layer's: no other layer has it for a query.
        path = paths.split(roles[0][0].path)
        return NamedLayer(path, AbsoluteLayer("/".join(path), *roles), "", heads, group)
    below = len("/".join((*module, "")))
    relative = (
        tuple(x._replace(path=x.path[below:]) for x in leaves) for leaves in roles
    )
    return NamedLayer(
        module, AttentionLayer("/".join(module), *relative), "", heads, group
    )

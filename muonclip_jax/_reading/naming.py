"""Attention layers that were read, as `AttentionLayer`, with paths for names."""

from collections.abc import Sequence
from typing import NamedTuple

from .._model.attention_layers import AttentionLayer
from .._model.head_leaf import HeadLeaf
from .._parameters import paths
from .head_layouts import head_leaf
from .layers import Layer, Part
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
    """Every layer once, however often the function calls it."""
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:
        own = (layer.query, layer.key, layer.whole, layer.shared, layer.refusal)
        parts = tuple(_identity(parts) for parts in own[:4])
        key = (*parts, layer.line if layer.refusal else "")
        groups.setdefault(key, []).append(layer)
    found = [(_module(group[0], leaf_paths), tuple(group)) for group in groups.values()]
    modules = [module for module, _ in found]
    return [
        _named(module, group, leaf_paths, shapes, modules.count(module) > 1)
        for module, group in found
    ]


def _identity(parts: Sequence[Part]) -> tuple:
    """Parts of the same leaves alike, in whatever dimensions a call has them."""
    return tuple(
        (
            p.parameter,
            frozenset(
                (
                    q.offset,
                    tuple(
                        (d.axis, d.stride, d.size)
                        for d in q.digits
                        if d.axis is not None and d.dim in p.dims
                    ),
                )
                for q in p.pieces
            ),
        )
        for p in parts
    )


def _module(layer: Layer, leaf_paths: Sequence[paths.Path]) -> paths.Path:
    own = [
        leaf_paths[p.parameter][:-1]
        for p in (*layer.query, *layer.key, *layer.whole, *layer.shared)
    ]
    if not own:
        return ()
    shortest = min(own, key=len)
    for n in range(len(shortest), -1, -1):
        if all(path[:n] == shortest[:n] for path in own):
            return shortest[:n]
    return ()


def _named(
    module: paths.Path,
    group: tuple[Layer, ...],
    leaf_paths: Sequence[paths.Path],
    shapes: Sequence[Shape],
    is_crowded: bool,
) -> NamedLayer:
    layer = group[0]
    base: paths.Path = () if is_crowded else module

    def leaves(parts: Sequence[Part]) -> list[HeadLeaf | None]:
        return [
            head_leaf(
                "/".join(leaf_paths[p.parameter][len(base) :]),
                shapes[p.parameter],
                p.pieces,
                p.dims,
                shared=not p.is_own and parts is not layer.shared,
            )
            for p in parts
        ]

    if is_crowded:
        # The first leaf's name is the layer's: no other layer has it for a query.
        first = (*layer.query, *layer.whole, *layer.key, *layer.shared)
        module = leaf_paths[first[0].parameter] if first else module
    query, key = leaves(layer.query), leaves(layer.key)
    whole, shared = leaves(layer.whole), leaves(layer.shared)
    if layer.refusal:
        return NamedLayer(module, None, layer.refusal, layer.heads, group)
    if not query:
        query, whole, key = whole, [], shared
    roles = [[x for x in leaves if x is not None] for leaves in (query, key, whole)]
    if sum(map(len, roles)) < len(query) + len(key) + len(whole):
        why = "its heads lie in a leaf as HeadLeaf cannot say"
        return NamedLayer(module, None, why, layer.heads, group)
    kind = AbsoluteLayer if is_crowded else AttentionLayer
    told = kind("/".join(module), *map(tuple, roles))
    return NamedLayer(module, told, "", layer.heads, group)

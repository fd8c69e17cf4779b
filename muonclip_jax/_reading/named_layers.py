"""Attention layers for QK-Clip: each layer once, with its leaves by their paths."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._model.attention_layers import AttentionLayer
from .._model.model_reading import LayerRead
from .._model.owned_leaf import OwnedLeaf
from .._model.shares import roles_of
from .._parameters import paths
from .._parameters.paths import Shape
from .attention import Layer
from .parts import ScaledEntries


class NamedLayer(NamedTuple):
    """An attention layer with its path: the deepest module that has all its leaves."""

    path: paths.Path
    layer: AttentionLayer | None  # as QK-Clip receives it; `None` if it cannot scale it
    refusal: str  # why it cannot, for people; else empty
    calls: tuple[Layer, ...]

    @property
    def is_recorded(self) -> bool:
        """Whether it has a statistic; a layer that nothing scales may have one."""
        is_known = not any(x.refusal or x.unclear for x in self.calls)
        is_known &= all(x.unscaled and x.sites for x in self.calls)
        return self.layer is not None or is_known

    def read(self, leaf_paths: Sequence[paths.Path]) -> LayerRead:
        """Returns what a reading keeps of the layer, for its table."""
        lines = dict.fromkeys(layer.line for layer in self.calls)
        sites = (site for layer in self.calls for site in layer.sites)
        biases = dict(bias for site in sites for bias in site.added.items())
        n, words = len(self.path), []
        for line, parameters in biases.items():
            place = ""
            if len(parameters) == 1:
                path = leaf_paths[min(parameters)]
                is_inside = path[:n] == self.path
                place = f": {paths.show(path[n:] if is_inside else ('', *path))}"
            words.append(f"the bias at {line} stays{place}")
        makers = sorted({i for layer in self.calls for i in layer.makers})
        return LayerRead(
            self.path,
            self.layer,
            self.refusal,
            self.calls[0].shape if self.is_recorded else None,
            (*lines,),
            (*words,),
            tuple(leaf_paths[i] for i in makers),
        )


Roles = tuple[tuple[OwnedLeaf, ...], ...]


class _LayerCall(NamedTuple):
    """One call of a layer: its leaves by their roles, or why there are none."""

    layer: Layer
    roles: Roles
    refusal: str

    @property
    def identity(self) -> Any:
        """A key that is equal for all calls of one layer."""
        if not self.layer.parts:
            return self.refusal, self.layer.makers, self.layer.line
        # A leaf may take the whole scale in one call, and half of it in another.
        whole = {leaf.path for leaves in self.roles[2:] for leaf in leaves}
        return bool(self.refusal), {x.parameter for x in self.layer.parts}, whole

    def is_of(self, other: "_LayerCall") -> bool:
        """Whether this is another call of the same layer.

        Both calls have the same parameters. Different parts of them, as a Python loop
        picks from a stack, are different layers; so are a whole stack and a part of it.
        """
        return self.identity == other.identity and not any(
            x.path == y.path and (x.stack != y.stack or x.is_apart_from(y))
            for mine, theirs in zip(self.roles, other.roles, strict=False)
            for x, y in itertools.product(mine, theirs)
        )


def named_layers(
    layers: Sequence[Layer], leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> list[NamedLayer]:
    """Returns every layer once, however often the function calls it."""
    calls = [_LayerCall(x, *_roles(x, leaf_paths, shapes)) for x in layers]
    groups: list[list[_LayerCall]] = []
    # First the calls whose heads are known.
    for call in sorted(calls, key=lambda call: bool(call.refusal)):
        group = next((group for group in groups if call.is_of(group[0])), None)
        if group is None:
            groups.append([call])
        else:
            group.append(call)
    # The path of a layer, under which its statistic is recorded, is unique: the deepest
    # module that holds all leaves, or all parameters that made the logits.
    modules, firsts = [], []
    for (layer, roles, _), *_ in groups:
        parameters = {part.parameter for part in layer.parts} or layer.makers
        parents = [leaf_paths[i][:-1] for i in sorted(parameters)] or [()]
        levels = zip(*parents, strict=False)
        same = itertools.takewhile(lambda x: len(set(x)) == 1, levels)
        modules.append(tuple(name for name, *_ in same))
        firsts.append(next((x.path for leaves in roles for x in leaves), ""))
    clipped = [m for m, group in zip(modules, groups, strict=True) if group[0].roles]
    named = []
    for i, group in enumerate(groups):
        (_, roles, refusal), *_ = group
        module, start, below = modules[i], "", len("/".join((*modules[i], "")))
        # Layers in the same module get the path of their first leaf, with a number
        # where these are equal, too, and their leaves are named from the root.
        if clipped.count(module) > 1 and roles:
            same_first = [j for j, first in enumerate(firsts) if first == firsts[i]]
            same_first.sort(key=lambda j: _place(groups[j][0].roles))
            number = (str(same_first.index(i)),) if len(same_first) > 1 else ()
            module, start, below = (*paths.split(firsts[i]), *number), "/", 0
        leaves = (
            tuple(dataclasses.replace(x, path=start + x.path[below:]) for x in role)
            for role in roles
        )
        layer = AttentionLayer("/".join(module), *leaves) if roles else None
        named.append(NamedLayer(module, layer, refusal, tuple(x.layer for x in group)))
    # A recorded layer that is not scaled gets a path that no other recorded layer has:
    # its module's, or its first parameter's, with a number if need be.
    taken = {x.path for x in named if x.layer is not None}
    for i, x in enumerate(named):
        if x.layer is None and x.is_recorded:
            makers = {y for call in x.calls for y in call.makers}
            first = leaf_paths[min(makers)] if makers else x.path
            numbered = ((*first, str(n)) for n in itertools.count())
            free = itertools.chain([x.path, first], numbered)
            path = next(y for y in free if y not in taken)
            taken.add(path)
            named[i] = x._replace(path=path)
    return named


def _place(roles: Roles) -> int:
    """Returns the place of a layer in its first leaf."""
    return next((int(np.argmax(x.mask)) for leaves in roles for x in leaves), 0)


def _roles(
    layer: Layer, leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> tuple[Roles, str]:
    """Returns query, key and rotary query by paths from the root, or a refusal."""
    if why := layer.refusal or layer.unscaled:
        return (), why
    groups = roles_of([(pair.query, pair.key) for pair in layer.pairs], layer.heads)
    if groups is None:
        return (), (
            "a parameter is in several of its products, which ask for different scales"
        )
    roles = []
    for parts in groups:
        entries: dict[int, ScaledEntries] = {}
        for part in parts:
            old = entries.get(part.parameter)
            entries[part.parameter] = old.joined_with(part) if old else part
        leaves = []
        for i, part in entries.items():
            path = "/".join(leaf_paths[i])
            if part.why:
                return (), part.why.format(path, shapes[i])
            is_of_all = part.leaf.heads == 1 < layer.heads
            leaf = dataclasses.replace(part.leaf, path=path, is_of_all=is_of_all)
            leaves.append(leaf)
        roles.append(tuple(leaves))
    return tuple(roles), ""

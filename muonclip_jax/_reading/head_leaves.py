"""Attention layers that were read, as QK-Clip is given them: leaves by their paths."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._model.attention_layers import AttentionLayer
from .._model.head_leaf import HeadLeaf
from .._parameters import paths
from .layers import head_digits, Layer, Part
from .pieces import Digit, PICKED, Pieces, Shape


class NamedLayer(NamedTuple):
    """An attention layer by its path, the deepest module that holds all its leaves."""

    path: paths.Path
    layer: AttentionLayer | None  # as QK-Clip is given it, if it can scale it
    refusal: str  # why not, for people; else empty
    heads: int  # of one layer of a stack
    found: tuple[Layer, ...]  # several where one layer is called often


Roles = tuple[tuple[HeadLeaf, ...], ...]


def named_layers(
    layers: Sequence[Layer], leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> list[NamedLayer]:
    """Every layer once, however often the function calls it.

    A call is of the layer that has the same parameters, unless they are told to have
    different parts of these, as layers have that a Python loop picks from a stack.
    """
    told = [(layer, *_roles(layer, leaf_paths, shapes)) for layer in layers]
    groups: list[tuple[Roles, str, list[Layer]]] = []
    # Those first of which it is known where the heads are.
    for layer, roles, refusal in sorted(told, key=lambda x: bool(x[2])):
        same = (g for g in groups if _is_same(g[2][0], g[0], layer, roles, refusal))
        group = next(same, None)
        if group is None:
            groups.append((roles, refusal, [layer]))
        else:
            group[2].append(layer)
    # The path of a layer is that of its statistic, and of nothing else.
    modules = [_module(found[0], leaf_paths) for *_, found in groups]
    # Of several layers in one module each is at its first leaf, with a number where
    # others are there, too, and its leaves are named from the root.
    clipped = [m for m, group in zip(modules, groups, strict=True) if group[0]]
    firsts = [next((x.path for of in roles for x in of), "") for roles, *_ in groups]
    named = []
    for i, (module, (roles, refusal, found)) in enumerate(
        zip(modules, groups, strict=True)
    ):
        layer, start, below = None, "", len("/".join((*module, "")))
        if roles and clipped.count(module) > 1:
            same_first = [j for j, first in enumerate(firsts) if first == firsts[i]]
            number = (str(same_first.index(i)),) if len(same_first) > 1 else ()
            module, start, below = (*paths.split(firsts[i]), *number), "/", 0
        if roles:
            query, key, whole = (
                tuple(x._replace(path=start + x.path[below:]) for x in leaves)
                for leaves in roles
            )
            layer = AttentionLayer("/".join(module), query, key, whole)
        named.append(NamedLayer(module, layer, refusal, found[0].heads, tuple(found)))
    return named


def _is_same(
    known: Layer, known_roles: Roles, layer: Layer, roles: Roles, refusal: str
) -> bool:
    if not layer.parts:
        told = (layer.makers, refusal, layer.line)
        return told == (known.makers, known.refusal, known.line)
    if {p.parameter for p in known.parts} != {p.parameter for p in layer.parts}:
        return False
    return not any(
        x.path == y.path and x.is_apart_from(y)
        for leaves, others in zip(roles, known_roles, strict=False)
        for x, y in itertools.product(leaves, others)
    )


def _module(layer: Layer, leaf_paths: Sequence[paths.Path]) -> paths.Path:
    """The deepest that holds all leaves, or all that the logits were made of."""
    own = {part.parameter for part in layer.parts} or layer.makers
    modules = [leaf_paths[i][:-1] for i in sorted(own)] or [()]
    same = itertools.takewhile(lambda x: len(set(x)) == 1, zip(*modules, strict=False))
    return tuple(part for part, *_ in same)


def _roles(
    layer: Layer, leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> tuple[Roles, str]:
    """Query, key and what brings the whole, by paths from the root, or why none are."""
    if layer.refusal:
        return (), layer.refusal
    groups = layer.query, layer.key, layer.whole
    if not layer.query and layer.shared and all(p.is_own for p in layer.whole):
        # Key heads for several queries each are a key, which QK-Clip then leaves alone.
        groups = layer.whole, layer.shared, []
    roles = []
    for parts in groups:
        found: list[HeadLeaf] = []
        for part in parts:
            path, shape = "/".join(leaf_paths[part.parameter]), shapes[part.parameter]
            is_shared = not part.is_own and parts is not layer.shared
            leaves = _head_leaves(path, shape, part, is_shared)
            if isinstance(leaves, str):
                return (), leaves
            # Several products of the same leaves scale them once.
            found += [x for x in leaves if x not in found]
        roles.append(tuple(found))
    if any(x in (*roles[0], *roles[1]) for x in roles[2]):
        return (), "the same entries would be scaled for two roles"
    return tuple(roles), ""


# Where a parameter has heads, as `HeadLeaf` says it.


class _Axis(NamedTuple):
    """An axis of one layer of a leaf, or a factor of it where heads cut it."""

    axis: int
    size: int
    stride: int
    head: Digit | None = None


def _head_leaves(
    path: str, shape: Shape, part: Part, is_shared: bool
) -> list[HeadLeaf] | str:
    """The leaf, once for every box of entries; or why `HeadLeaf` cannot say it.

    Axes are cut into the factors that heads are counted by. In these, the entries of
    the first head, in the first layer of a stack, are boxes.
    """
    cannot = f"no HeadLeaf says where the heads are in '{path}' {shape}"
    digits = head_digits(part.pieces, part.heads)
    if digits is None:
        return cannot
    others = [d for p in part.pieces for d in p.digits if d.dim not in part.heads]
    if any(d.dim == PICKED and d.axis is not None for d in others):
        return (
            f"an index that is no counter of a loop picks a layer of '{path}' {shape}: "
            "use jax.lax.scan over the stack, or an index that counts 0, 1, ..."
        )
    stack = sorted({d.axis for d in others if (d.dim or 0) < 0 and d.axis is not None})
    if stack and stack != list(range(stack[0], stack[0] + len(stack))):
        return cannot
    axes = [i for i in range(len(shape)) if i not in stack]
    view: list[_Axis] = []
    for axis in axes:
        factors = _factors(axis, shape[axis], [d for d in digits if d.axis == axis])
        if factors is None:
            return cannot
        view += factors
    heads = [next(i for i, x in enumerate(view) if x.head == d) for d in digits]
    if not digits and not is_shared:
        # One head for all others: it has an axis of its own once one is cut.
        last = view[-1]
        view.insert(-1, _Axis(last.axis, 1, last.size))
        heads = [len(view) - 2]
    split = [axis for axis in axes if sum(x.axis == axis for x in view) > 1]
    boxes = _boxes(view, part.pieces, digits)
    if len(split) > 1 or boxes is None:
        return cannot
    ends = tuple(i - len(view) for i in heads)
    return [
        HeadLeaf(
            path,
            len(axes),
            ends[0] if len(ends) == 1 else ends or None,
            tuple(x.size for x in view if x.axis in split),
            box[0] if len(box) == 1 else box or None,
            stack[0] if stack else 0,
            axes.index(split[0]) - len(axes) if split else -1,
        )
        for box in boxes
    ]


def _factors(axis: int, size: int, heads: Sequence[Digit]) -> list[_Axis] | None:
    """An axis as the factors that the digits of heads count by, major first."""
    found, room = [], size
    for d in sorted(heads, key=lambda d: -d.stride):
        if d.stride < 1 or room % d.stride:
            return None
        outer, rest = divmod(room, d.stride * d.size)
        if rest or not outer:
            # Heads of others are there, too: queries before the keys that groups share.
            found.append(_Axis(axis, room // d.stride, d.stride, d))
        else:
            found += [_Axis(axis, outer, d.stride * d.size)] if outer > 1 else []
            found.append(_Axis(axis, d.size, d.stride, d))
        room = d.stride
    return found + ([_Axis(axis, room, 1)] if room > 1 or not found else [])


def _boxes(
    view: Sequence[_Axis], pieces: Pieces, digits: Sequence[Digit]
) -> list[tuple[tuple[int, slice], ...]] | None:
    """The axes of a view that are cut, with the slices, for each box of entries."""
    boxes = []
    for region in _regions(pieces, digits):
        ranges: list[list[tuple[int, int]]] = []
        for x in view:
            places = {entry // x.stride % x.size for entry in region[x.axis]}
            runs = _runs(places)
            if x.head is not None:
                # The first head's place, of as many as are counted.
                runs = [(low, low + x.head.size) for low, _ in runs]
                if len(places) > 1:
                    return None
            ranges.append(runs)
        # A box around entries that are no product of ranges has others in it, which
        # scaling it would scale.
        for axis in {x.axis for x in view}:
            own = [
                1 if x.head else sum(high - low for low, high in of)
                for x, of in zip(view, ranges, strict=True)
                if x.axis == axis
            ]
            if math.prod(own) != len(region[axis]):
                return None
        for box in itertools.product(*ranges):
            boxes.append(
                tuple(
                    (i - len(view), slice(*of))
                    for i, of in enumerate(box)
                    if of != (0, view[i].size)
                )
            )
    return boxes


def _regions(pieces: Pieces, digits: Sequence[Digit]) -> list[list[frozenset[int]]]:
    """The entries of the first head along each axis; pieces that complete one another,
    as the even and odd entries that a rotary embedding turns, are one region.
    """
    regions: list[list[frozenset[int]]] = []
    for p in pieces:
        region = []
        for axis, offset in enumerate(p.offset):
            own = [d for d in p.digits if d.axis == axis and d not in digits]
            steps = [
                range(0, d.size * d.stride, d.stride)
                for d in own
                if d.dim is None or d.dim >= 0
            ]
            places = itertools.product(*steps)
            region.append(frozenset(offset + sum(at) for at in places))
        regions.append(region)
    merged: list[list[frozenset[int]]] = []
    while regions:
        region = regions.pop()
        for other in regions:
            differ = [i for i, x in enumerate(region) if x != other[i]]
            if len(differ) < 2:
                for i in differ:
                    other[i] |= region[i]
                break
        else:
            merged.append(region)
    return merged[::-1]


def _runs(places: Iterable[int]) -> list[tuple[int, int]]:
    """Ranges of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for at in sorted(places):
        if runs and runs[-1][1] == at:
            runs[-1] = runs[-1][0], at + 1
        else:
            runs.append((at, at + 1))
    return runs

"""Attention layers that were read, as QK-Clip is given them: leaves by their paths."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._model.attention_layers import AttentionLayer
from .._model.head_leaf import HeadLeaf
from .._parameters import paths
from .layers import Layer, Part
from .pieces import Digit, PICKED, Shape


class NamedLayer(NamedTuple):
    """An attention layer by its path, the deepest module that holds all its leaves."""

    path: paths.Path
    layer: AttentionLayer | None  # as QK-Clip is given it, if it can scale it
    refusal: str  # why not, for people; else empty
    found: tuple[Layer, ...]  # several where one layer is called often


Roles = tuple[tuple[HeadLeaf, ...], ...]


def named_layers(
    layers: Sequence[Layer], leaf_paths: Sequence[paths.Path], shapes: Sequence[Shape]
) -> list[NamedLayer]:
    """Every layer once, however often the function calls it."""

    def is_same(a: tuple[Roles, str, Layer], b: tuple[Roles, str, Layer]) -> bool:
        """Whether two calls are of one layer: they have the same parameters.

        Unless they are told to have different parts of these, as layers have that a
        Python loop picks from a stack.
        """
        if not b[2].parts:
            one, two = ((x[1], x[2].makers, x[2].line) for x in (a, b))
            return one == two
        one, two = ({part.parameter for part in x[2].parts} for x in (a, b))
        return one == two and not any(
            x.path == y.path and x.is_apart_from(y)
            for mine, theirs in zip(a[0], b[0], strict=False)
            for x, y in itertools.product(mine, theirs)
        )

    calls = [(*_roles(layer, leaf_paths, shapes), layer) for layer in layers]
    groups: list[list[tuple[Roles, str, Layer]]] = []
    # Those first of which it is known where the heads are.
    for call in sorted(calls, key=lambda call: bool(call[1])):
        group = next((group for group in groups if is_same(group[0], call)), None)
        if group is None:
            groups.append([call])
        else:
            group.append(call)
    # The path of a layer is that of its statistic, and of nothing else: the deepest
    # module that holds all leaves, or all that the logits were made of.
    modules, firsts = [], []
    for (roles, _, layer), *_ in groups:
        own = {part.parameter for part in layer.parts} or layer.makers
        around = [leaf_paths[i][:-1] for i in sorted(own)] or [()]
        levels = zip(*around, strict=False)
        same = itertools.takewhile(lambda x: len(set(x)) == 1, levels)
        modules.append(tuple(name for name, *_ in same))
        firsts.append(next((x.path for leaves in roles for x in leaves), ""))
    clipped = [m for m, group in zip(modules, groups, strict=True) if group[0][0]]
    named = []
    for i, group in enumerate(groups):
        (roles, refusal, _), *_ = group
        module, start, below = modules[i], "", len("/".join((*modules[i], "")))
        # Of several layers in one module each is at its first leaf, with a number where
        # others are there, too, and its leaves are named from the root.
        if clipped.count(module) > 1 and roles:
            same_first = [j for j, first in enumerate(firsts) if first == firsts[i]]
            number = (str(same_first.index(i)),) if len(same_first) > 1 else ()
            module, start, below = (*paths.split(firsts[i]), *number), "/", 0
        leaves = (
            tuple(x._replace(path=start + x.path[below:]) for x in of) for of in roles
        )
        layer = AttentionLayer("/".join(module), *leaves) if roles else None
        named.append(NamedLayer(module, layer, refusal, tuple(x[2] for x in group)))
    return named


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
            leaves = _head_leaves(path, shape, part, parts is layer.shared)
            if isinstance(leaves, str):
                why = leaves or "no HeadLeaf says where the heads are in '{}' {}"
                return (), why.format(path, shape)
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
    path: str, shape: Shape, part: Part, is_key: bool
) -> list[HeadLeaf] | str:
    """The leaf, once for every box of entries; or why `HeadLeaf` cannot say it.

    Axes are cut into the factors that heads are counted by. In these, the entries of
    the first head, in the first layer of a stack, are boxes.
    """
    digits: list[Any] = [d for p in part.pieces for d in p.digits if d.axis is not None]
    others = [d for d in digits if d.dim not in part.heads]
    if any(d.dim == PICKED for d in others):
        return (
            "an index that is no counter of a loop picks a layer of '{}' {}: use "
            "jax.lax.scan over the stack, or an index that counts 0, 1, ..."
        )
    stack = sorted({d.axis for d in others if d.dim is not None and d.dim < 0})
    is_apart = len(stack) > 1 and stack[-1] - stack[0] >= len(stack)
    if part.digits is None or is_apart:
        return ""
    axes, view = [i for i in range(len(shape)) if i not in stack], []
    for axis in axes:
        room, start = shape[axis], len(view)
        for d in sorted(part.digits, key=lambda d: -d.stride):
            if d.axis != axis:
                continue
            if d.stride < 1 or room % d.stride:
                return ""
            count, room = room // d.stride, d.stride
            # Heads of others may be there, too: queries before keys that groups share.
            if count % d.size == 0 and count > d.size:
                view.append(_Axis(axis, count // d.size, d.stride * d.size))
                count = d.size
            view.append(_Axis(axis, count, d.stride, d))
        if room > 1 or len(view) == start:
            view.append(_Axis(axis, room, 1))
    heads = [next(i for i, x in enumerate(view) if x.head == d) for d in part.digits]
    if not part.digits and (part.is_own or is_key):
        # One head for all others: it has an axis of its own once one is cut.
        last = view[-1]
        view.insert(-1, _Axis(last.axis, 1, last.size))
        heads = [len(view) - 2]
    split = [axis for axis in axes if sum(x.axis == axis for x in view) > 1]
    boxes = _boxes(view, part)
    if len(split) > 1 or boxes is None:
        return ""
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


def _boxes(
    view: Sequence[_Axis], part: Part
) -> list[tuple[tuple[int, slice], ...]] | None:
    """The axes of a view that are cut, with the slices, for each box of entries."""
    # The entries of the first head along each axis; pieces that complete one another,
    # as the even and odd entries that a rotary embedding turns, are one region.
    regions: list[list[set[int]]] = []
    for p in part.pieces:
        region = []
        for axis, offset in enumerate(p.offset):
            steps = [
                range(0, d.size * d.stride, d.stride)
                for d in p.digits
                if d.axis == axis and d not in (part.digits or ())
                if d.dim is None or d.dim >= 0
            ]
            region.append({offset + sum(at) for at in itertools.product(*steps)})
        for other in regions:
            differ = [i for i, x in enumerate(region) if x != other[i]]
            if len(differ) < 2:
                for i in differ:
                    other[i] |= region[i]
                break
        else:
            regions.append(region)
    boxes = []
    for region in regions:
        ranges, inside = [], dict.fromkeys((x.axis for x in view), 1)
        for x in view:
            places = {entry // x.stride % x.size for entry in region[x.axis]}
            pairs = enumerate(sorted(places))  # runs of consecutive numbers
            by_run = itertools.groupby(pairs, lambda pair: pair[1] - pair[0])
            ends = ([at for _, at in run] for _, run in by_run)
            runs = [(run[0], run[-1] + 1) for run in ends]
            inside[x.axis] *= len(places)
            if x.head is not None:
                # The first head's place, of as many as are counted.
                runs = [(low, low + x.head.size) for low, _ in runs]
                if len(places) > 1:
                    return None
            ranges.append(runs)
        # A box around entries that are no product of ranges has others in it, which
        # scaling it would scale.
        if any(inside[axis] != len(region[axis]) for axis in inside):
            return None
        for box in itertools.product(*ranges):
            cuts = ((i - len(view), slice(*of)) for i, of in enumerate(box))
            full = (slice(0, x.size) for x in view)
            pairs = zip(cuts, full, strict=True)
            boxes.append(tuple(cut for cut, every in pairs if cut[1] != every))
    return boxes

"""Leaves of one layer: what is left of a stacked leaf, turned and named as in Flax.

Layers are stacked where `stack_axes` or the leaf's axis names say. Otherwise norms show
them, which have one axis in one layer. If all leaves under a module have the same sizes
at the same place, and its norms have only these axes besides their one, these axes are
a stack: in front, as in Flax, Haiku and Haliax, after the first axis, as in MaxText, or
at the end.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from . import names
from .layer_stacks import given_stacks, LayerStack, stack_at, StackAxes
from .paths import is_masked, LeafAt, Path, Shape


def find_stacks(
    leaf_at: LeafAt, stack_axes: StackAxes, axis_names: Mapping[Path, tuple[str, ...]]
) -> dict[Path, LayerStack]:
    """Returns the stack of each leaf: given, or shared by all leaves of a module."""
    stacks = given_stacks(leaf_at, stack_axes, axis_names)
    members: dict[Path, dict[Path, Shape]] = {}  # the open leaves of each module
    hiding: set[Path] = set()  # modules of which a mask hides a part
    for path, leaf in leaf_at.items():
        modules = [path[:depth] for depth in range(len(path))]
        if is_masked(leaf):
            hiding.update(modules)
        elif path not in stacks:
            for module in modules:
                members.setdefault(module, {})[path] = tuple(leaf.shape)
    outermost = sorted(members, key=len)
    for i, module in enumerate(outermost):  # the outermost of nested stacks
        if len(members[module]) > 1 and stacks.keys().isdisjoint(members[module]):
            first, *others = [*_shared(members[module]), {}]
            if first and module in hiding:
                # Hidden leaves may not share it: then it is at another place, or
                # modules inside this one have stacks.
                inner = (x for x in outermost[i + 1 :] if x[: len(module)] == module)
                inner = (members[x] for x in inner if len(members[x]) > 1)
                others += [each for shapes in inner for each in _shared(shapes)]
                is_sure = all(first[p] == x for each in others for p, x in each.items())
                first = {p: x._replace(is_sure=is_sure) for p, x in first.items()}
            stacks |= first
    return dict.fromkeys(leaf_at, LayerStack(0, 0)) | stacks


def _shared(shapes: Mapping[Path, Shape]) -> list[dict[Path, LayerStack]]:
    """Returns the stacks that all leaves under a module share, the likeliest first."""
    norms = {p for p in shapes if names.is_norm(p)}
    kernels = {p for p in shapes if p[-1] in names.KERNELS} - norms
    # Libraries put layers first, after the first axis, or last.
    vectors, places = [shapes[p] for p in norms], (0, 1, -1)
    if not vectors:
        # A bias may have an axis of heads, which a kernel has after its first. Only a
        # bias that differs from the last axes of its kernel shows a stack.
        biases = {p[:-1]: without_ones(x) for p, x in shapes.items() if p[-1][0] == "b"}
        pairs = [(biases.get(p[:-1], ()), shapes[p]) for p in kernels]
        if any(bias != kernel[-len(bias) :] for bias, kernel in pairs if bias):
            vectors, places = [bias for bias, _ in pairs if bias], (0,)
    depth = min(map(len, vectors), default=0) - 1
    # A gain for each output of the only kernel, such as one per head, is no stack.
    is_one = len(kernels) == 1 and all(
        x == shapes[p][-len(x) :] for p in kernels for x in vectors
    )
    if depth < 1 or is_one or max(map(len, shapes.values())) <= depth + (not kernels):
        return []
    shared = []
    for axis in places:
        stack_of = {p: stack_at(axis, len(x), depth) for p, x in shapes.items()}
        if len({x and x.sizes(shapes[p]) for p, x in stack_of.items()}) == 1:
            shared.append({p: x for p, x in stack_of.items() if x})
    return shared


def without_ones(bias: Shape) -> Shape:
    """A bias as Flax has it: `(out, 1, 1)` in Equinox, `(1, 1, 1, out)` in stax."""
    return tuple(size for size in bias if size != 1) or bias[:1]


class FlaxLeaf(NamedTuple):
    """A leaf in Flax's words, `(inputs..., outputs...)` in one layer."""

    tree_path: Path  # in the tree
    path: Path  # in Flax's words
    shape: Shape
    axes: tuple[int, ...]  # the leaf's, from the end, of each axis of the shape
    bias: Shape | None  # next to it; `()` if a mask hides it
    kind: str  # by its name
    is_turned: bool  # the leaf has its outputs first
    is_hidden: bool  # by a mask
    # By what is around it:
    role: str = ""  # in a layout
    letters: tuple[str, ...] = ()  # of the layout, or of several that fit
    experts: Shape | None = None  # the shape of the router
    is_part: bool = False  # a kernel is next to it
    width: float = 0  # the features of the model
    hides: bool = False  # a mask hides what may decide

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def module(self) -> str:
        return "".join(self.path[-2:-1])

    @property
    def is_kernel(self) -> bool:
        return "kernel" in names.words("".join(self.path[-1:]))

    @property
    def is_layer(self) -> bool:
        """Whether the leaf is a kernel with a bias, hidden or not."""
        return self.is_kernel and self.bias is not None

    @property
    def is_table(self) -> bool:
        return self.kind == "embedding" and not self.is_layer

    @property
    def is_conv(self) -> bool:
        return self.is_kernel and names.is_convolution(self.path)

    @property
    def window(self) -> Shape:
        """The axes between inputs and outputs, or in front, as Flax has a window."""
        return self.shape[1:-1] if self.is_turned else self.shape[:-2]

    @property
    def is_square(self) -> bool:
        return len(self.window) > 1 and len({*self.window}) == 1

    @property
    def features(self) -> int:
        """The inputs of a kernel; of a window its channels, which PyTorch has first."""
        return self.shape[0 if self.is_turned else -2]

    def numbers(self, inputs: Iterable[int], outputs: Iterable[int]):
        """Returns dimension numbers of the leaf, from axes of the shape."""
        sides = (tuple(self.axes[i] for i in axes) for axes in (inputs, outputs))
        return MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in sides))


def leaves_of(
    leaf_at: LeafAt, stacks: Mapping[Path, LayerStack]
) -> dict[Path, FlaxLeaf]:
    """Returns one layer of each leaf in Flax's words, turned if outputs come first."""
    shapes, axes_of = {}, {}
    for tree_path, (start, depth, _) in stacks.items():
        shape = () if is_masked(leaf_at[tree_path]) else tuple(leaf_at[tree_path].shape)
        kept = [i for i in range(len(shape)) if not start <= i < start + depth]
        shapes[tree_path] = tuple(shape[i] for i in kept)
        axes_of[tree_path] = tuple(i - len(shape) for i in kept)
    written = _in_flax(shapes)
    layer_at = {path: shapes[tree_path] for tree_path, path in written.items()}
    bias_of = {p: layer_at.get((*x[:-1], "bias")) for p, x in written.items()}

    def is_outputs_first(tree_path: Path) -> bool | None:
        """Whether a bias shows that outputs come first; `None` if it is open."""
        shape, bias = shapes[tree_path], without_ones(bias_of[tree_path] or ())
        first, last = shape[:1] == bias, shape[-1:] == bias
        return first if first != last and len(shape) > 1 else None

    # In Equinox and Haliax the outputs of a `weight` come first, unless the biases of
    # other weights disagree. Square kernels, and kernels without a bias, have no vote.
    weights = {
        tree_path
        for tree_path, path in written.items()
        if tree_path and _apart(tree_path[-1])[-1] == "weight" and path[-1] == "kernel"
    }
    votes = [x for x in map(is_outputs_first, weights) if x is not None]
    weights_turned = sum(votes) * 2 >= len(votes)
    leaves: dict[Path, FlaxLeaf] = {}
    for tree_path, path in written.items():
        shape, axes, bias = shapes[tree_path], axes_of[tree_path], bias_of[tree_path]
        is_kernel = path[-1:] == ("kernel",)
        spelled = _apart(tree_path[-1])[-1] if is_kernel else "".join(path[-1:])
        kind = names.kind((*path[:-1], spelled))
        is_array = kind == "embedding" and not is_kernel
        is_turned = False if is_array else is_outputs_first(tree_path)
        if is_turned is None:
            is_weight = tree_path in weights and weights_turned and kind != "embedding"
            is_turned = is_weight and without_ones(bias or ()) != shape  # else a gain
        # All axes of heads come first.
        has_heads = path[-2:-1] in (("query",), ("key",), ("value",))
        shift = is_turned * (len(shape) - 1 if has_heads else 1)
        shape, axes = shape[shift:] + shape[:shift], axes[shift:] + axes[:shift]
        is_hidden = is_masked(leaf_at[tree_path])
        leaves[tree_path] = FlaxLeaf(
            tree_path, path, shape, axes, bias, kind, is_turned, is_hidden
        )
    return leaves


def _apart(name: str) -> list[str]:
    """Splits a name into modules and a leaf. e3nn writes `w[0,1] 32x0e,8x1o`."""
    return re.sub(r"^(w|weight|kernel)\[.*", r"\1", name).split(".")


def _in_flax(shapes: Mapping[Path, Shape]) -> dict[Path, Path]:
    """Returns the path of every leaf in Flax's words."""
    written: dict[Path, Path] = {}
    for tree_path, shape in shapes.items():
        # penzai writes `query.weights`, a checkpoint of PyTorch the whole path, SAM in
        # Scenic `layers.2`.
        above = [x for name in tree_path[:-1] for x in name.split(".")]
        *module, last = (*above, *_apart(tree_path[-1])) if tree_path else ("",)
        if last == "b" and (*tree_path[:-1], "w") in shapes:
            last = "bias"
        elif last in ("w", "weight", "weights") and (
            module or (last == "weight" and ("bias",) in shapes)
        ):
            # A weight with more axes than its bias is a layer, whatever its name.
            name = "bias" if last == "weight" else "b"
            bias = shapes.get((*tree_path[:-1], name), ())
            is_gain = names.is_norm(tree_path) and not 0 < len(bias) < len(shape)
            last = "scale" if is_gain else "kernel"
        elif last in ("0", "1") and (*tree_path[:-1], "2") not in shapes:
            # A pair of arrays whose second is a bias: stax, and lists written by hand.
            kernel, bias = (shapes.get((*tree_path[:-1], i), ()) for i in "01")
            if len(kernel) > 1 and without_ones(bias) in (kernel[-1:], kernel[:1]):
                last = "kernel" if last == "0" else "bias"
        written[tree_path] = (*module, last) if tree_path else tree_path
    # The roles of what is in each module, if it has those of attention.
    named = {path[: i + 1] for path in written.values() for i in range(len(path))}
    count = Counter((x[:-1], names.projection(x[-1])) for x in named)
    for tree_path, path in written.items():
        for depth in range(max(len(path) - 2, 0), len(path)):
            module, rest = path[:depth], path[depth + 1 :]
            role = names.projection(path[depth])
            # Only one module may have the role, and a bare array needs an `out` next
            # to it.
            is_one = role and count[module, role] == 1
            has_others = count[module, "query"] and count[module, "key"]
            if is_one and has_others and (rest or count[module, "out"]):
                written[tree_path] = (*module, role, *(rest or ("kernel",)))
                break
    return written

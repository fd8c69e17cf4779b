"""Rules that decide what a leaf is, by its name, its shape and its neighbors.

Leaves are first written as Flax would have them, one layer of each stack, so that one
list serves all libraries. The first rule that holds decides; `outputs` then looks for
kernels that may write the output. Where a rule would have to guess, an error asks.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax.numpy as jnp

from . import names
from .flax_leaves import find_stacks, FlaxLeaf, leaves_of, without_ones
from .layer_stacks import IN_FRONT, StackAxes
from .layouts import ATTENTION, DENSE, LayerAxes, layouts_of, sides_of, WITH_HEADS
from .outputs import outputs_of
from .paths import is_masked, Path, PathedTree, Shape
from .verdict import UnknownDirection, Verdict


_WINDOW = 8  # of a convolution over time, at most
_PATCH = 16  # of any convolution, at most
_HEADS = 16  # of attention, or streams, experts, tokens: far fewer than features


class LeafRule(NamedTuple):
    """A kind of leaf: its condition and its label.

    The condition of a matrix returns its sides. With "asked" in place of a label, an
    error asks the user.
    """

    kind: str
    holds: Callable[[FlaxLeaf], Any]
    label: str = "vector"
    is_sure: Callable[[FlaxLeaf], bool] = lambda x: True

    def verdict(self, leaf: FlaxLeaf) -> Verdict | None:
        sides = self.holds(leaf)
        if not sides:
            return None
        if self.label == "asked":
            return Verdict("matrix", _guess(leaf), self.kind, is_known=False)
        numbers = leaf.numbers(*sides) if isinstance(sides, LayerAxes) else None
        # Biases show the direction of weights, also of other layers' weights.
        is_open = leaf.hides and (leaf.tree_path[-1:] == ("weight",) or leaf.bias == ())
        if numbers and leaf.rank == 2 and is_open:
            numbers = UnknownDirection(*numbers)
        return Verdict(self.label, numbers, self.kind, is_sure=self.is_sure(leaf))


def is_named(x: FlaxLeaf) -> bool:
    """A kernel with a bias, or in a module that has a name, not a number in a list."""
    return x.is_layer or (x.is_kernel and bool(x.module and not x.module.isdigit()))


def is_array(x: FlaxLeaf) -> bool:
    """Neither a kernel nor called as a layer is."""
    is_layer = x.is_kernel or names.is_called_layer(x.path[-1:])
    return not (is_layer or names.is_low_rank(x.path))


def is_few(x: FlaxLeaf) -> bool:
    """Few rows where the model has many features: of heads, streams or tokens."""
    few, features = min(x.shape), max(x.width, *x.shape)
    is_weight = not names.KERNELS.isdisjoint(names.words("".join(x.path[-1:]))[-1:])
    is_narrow = few <= _HEADS and x.width > 4 * few and not is_weight
    return (few < _WINDOW or is_narrow) and features >= 16


def is_small(x: FlaxLeaf) -> bool:
    """An array of a few rows may be gains; alongside a kernel, its mask or a vector."""
    return (is_few(x) or x.is_part) if is_array(x) else x.is_kernel and is_mixing(x)


def is_mixing(x: FlaxLeaf) -> bool:
    """A small square without a bias may mix heads or streams, if it is not a layer."""
    is_layer = x.bias is not None or names.is_called_layer(x.path[-2:-1]) or x.is_conv
    is_layer |= bool(names.UNNAMED.fullmatch(x.module))
    few, features = min(x.shape), max(x.width, *x.shape)
    return x.shape == (few, few) and 4 * few <= features >= 16 and not is_layer


def is_depthwise(x: FlaxLeaf) -> bool:
    """One input for each output, in a window; Keras has one output for each input."""
    is_window = x.is_conv or without_ones(x.bias or ()) == x.shape[-1:] or x.is_square
    is_one = (x.features == 1 and is_window) or x.shape[-1] == 1
    return is_one and {*x.window} != {1}


def is_hidden(x: FlaxLeaf) -> bool:
    """A mask hides norms and biases, which would show stacks and windows."""
    is_open = x.tree_path[-1:] == ("weight",) or (x.role in WITH_HEADS and x.rank > 3)
    return x.hides and is_open


def is_open(x: FlaxLeaf) -> bool:
    """Several layouts fit, or nothing says that it is a kernel of one layer."""
    is_stack = x.is_turned and not x.bias and max(x.window) > _PATCH
    return bool(x.letters) or not x.is_kernel or is_stack


def by_layout(x: FlaxLeaf) -> LayerAxes | None:
    return sides_of(x.letters[0]) if len(x.letters) == 1 else None


def as_expert(x: FlaxLeaf) -> LayerAxes | None:
    """Returns the sides of a kernel of as many experts as its router has outputs.

    HuggingFace has outputs first in some models: what is called down gives features,
    and what is called up or gate takes them.
    """
    features, count = x.experts or (0, 0)
    if x.rank < 3 or x.shape[-3] != count or features not in x.shape[-2:]:
        return None
    words = {*names.words(x.tree_path[-1]), *names.words(x.module)}
    has_direction = words & {"up", "gate", "down"} and x.shape[-2] != x.shape[-1]
    is_turned = has_direction and (x.shape[-1] == features) != ("down" in words)
    return LayerAxes((-1,), (-2,)) if is_turned else DENSE


def by_bias(x: FlaxLeaf) -> LayerAxes | None:
    """A bias has one entry per output, which separates input axes from output axes."""
    bias, rank = without_ones(x.bias or ()), x.rank
    fitting = [
        LayerAxes(range(len(bias) - n - rank, -n), range(-n, 0))
        for n in range(1, len(bias) + 1)
        if len(bias) < rank and bias == x.shape[: len(bias) - n] + x.shape[-n:]
    ]
    # Outputs may be first (NetKet) or last. A bias that fits both ends decides nothing,
    # except for convolutions.
    is_either = bias == x.shape[: len(bias)] and not (x.is_conv or x.is_turned)
    return fitting[0] if len(fitting) == 1 and not is_either else None


def as_window(x: FlaxLeaf) -> LayerAxes | None:
    """All but the outputs. Without a bias, a window of unequal sides may be scanned."""
    is_whole = x.is_conv and not x.bias and len({*x.window}) == 1
    return LayerAxes(range(-x.rank, -1), (-1,)) if is_whole else None


#: In this order. With a bias, what is called a table is a layer, such as patches.
RULES = (
    LeafRule("vector", lambda x: x.rank < 2 or 0 in x.shape),
    # Gains of a layer, a token: one row has no singular values to make even.
    LeafRule("vector", lambda x: is_array(x) and len(without_ones(x.shape)) < 2),
    LeafRule("bias", lambda x: x.kind == "bias"),
    # A kernel with a shift of the same shape is a gain, whatever its name.
    LeafRule("norm", lambda x: x.kind == "norm" or (x.is_layer and x.shape == x.bias)),
    LeafRule("embedding", lambda x: x.is_table and x.shape[0] > 1, "embedding"),
    # A table of one row is added and not looked up.
    LeafRule("embedding", lambda x: x.is_table, "vector"),
    LeafRule("positions or tokens", lambda x: x.kind == "added" and not x.is_layer),
    LeafRule("output head: named so", lambda x: x.kind == "head", "head"),
    LeafRule(
        "may be no layer",
        # The bias alongside is that of a kernel, not of a `diag_kernel`.
        lambda x: (
            x.kind == "no layer" and not (x.is_layer and x.path[-1:] == ("kernel",))
        ),
        "asked",
    ),
)
#: Leaves of two axes.
OF_TWO_AXES = (
    LeafRule(
        "one output",
        lambda x: (
            (x.is_kernel or names.is_called_layer(x.path[-1:]))
            and 1 in x.shape[-1:]
            and not names.is_low_rank(x.path)
        ),
    ),
    LeafRule("router", lambda x: x.experts, "router"),
    # RecurrentGemma: (window, channels).
    LeafRule(
        "depthwise convolution",
        lambda x: x.is_conv and min(x.shape) <= _WINDOW,
        is_sure=lambda x: False,
    ),
    LeafRule("open", is_small, "asked"),
    LeafRule("outputs first", lambda x: x.is_turned and DENSE, "matrix", is_named),
    LeafRule("inputs, outputs", lambda x: DENSE, "matrix", is_named),
)
#: Leaves of more axes: shapes together decide, or a bias, or the name of a window.
OF_MORE_AXES = (
    LeafRule("open", is_hidden, "asked"),
    LeafRule("attention", lambda x: x.role in ATTENTION and by_layout(x), "matrix"),
    LeafRule("shapes together", by_layout, "matrix"),
    LeafRule("experts of a router", as_expert, "matrix"),
    LeafRule("open", is_open, "asked"),
    # Hidden leaves may show a stack of layers instead.
    LeafRule("open", lambda x: x.hides and not x.is_conv and is_depthwise(x), "asked"),
    LeafRule("depthwise convolution", is_depthwise, is_sure=lambda x: False),
    LeafRule("convolution", lambda x: x.is_conv and by_bias(x), "matrix"),
    LeafRule("convolution", as_window, "matrix"),
    LeafRule("bias shape", lambda x: not x.is_conv and by_bias(x), "matrix"),
    LeafRule(
        "one layer", lambda x: not x.bias and {*x.shape[:-2]} == {1} and DENSE, "matrix"
    ),
    LeafRule("open", lambda x: True, "asked"),
)


def _guess(x: FlaxLeaf) -> Any:
    """Returns axes for the user to check: of heads, a window, or a stack of kernels."""
    if x.rank == 3 and x.module in WITH_HEADS:
        return x.numbers((-3,), (-2, -1))
    is_window = x.is_turned and x.rank > 2 and max(x.window) <= _PATCH
    is_window |= (x.rank > 3 and x.is_square) or (x.rank == 3 and x.module == "out")
    if is_window:
        return x.numbers(range(-x.rank, -1), (-1,))
    return x.numbers(*(((-3,), (-2,)) if x.is_turned and x.rank > 2 else DENSE))


class ByNames:
    """The leaves of a tree in Flax's words, and what each is."""

    def __init__(self, tree: PathedTree, stack_axes: StackAxes = IN_FRONT):
        self.leaf_at = tree.by_path()
        self.stacks = find_stacks(self.leaf_at, stack_axes, tree.axis_names)
        leaves = leaves_of(self.leaf_at, self.stacks)
        for tree_path, axes in tree.axis_names.items():
            if "vocab" in axes:
                is_first = axes.index("vocab") - len(axes) == leaves[tree_path].axes[0]
                kind = "embedding" if is_first else "head"
                leaves[tree_path] = leaves[tree_path]._replace(kind=kind)
        hidden = {path for path, x in self.leaf_at.items() if is_masked(x)}
        self.hides = any(map(names.is_vector, hidden))
        # A mask of matrices hides vectors, tables and heads, which its maker knew.
        vectors = {x for x in leaves if names.is_vector(x)}
        vectors |= {x.tree_path for x in leaves.values() if x.kind not in ("", "head")}
        tables = {x.tree_path for x in leaves.values() if x.kind == "embedding"}
        in_sight = [x for x in leaves.values() if x.tree_path not in hidden]
        has_others = any(
            x.rank < 2 or x.kind or x.tree_path in vectors for x in in_sight
        )
        may_hide_heads = bool(hidden - vectors or hidden & tables)
        self.is_of_matrices = self.hides and may_hide_heads and not has_others
        layouts, experts = layouts_of(leaves.values()), _experts(leaves.values())
        modules = {x.path[:-1] for x in leaves.values() if x.is_kernel or x.rank > 2}
        width = max(
            (sorted(x.shape)[-2] for x in leaves.values() if x.rank > 1), default=0
        )
        if hidden - vectors:
            width = math.inf
        self.leaves = {
            tree_path: x._replace(
                experts=experts.get(tree_path),
                is_part=x.path[:-1] in modules,
                width=width,
                hides=self.hides,
                **layouts.get(tree_path, {}),
            )
            for tree_path, x in leaves.items()
        }
        self.tree_path_of = {leaf.path: tree_path for tree_path, leaf in leaves.items()}

    def lacks_heads(self, kernel: Path) -> bool:
        """Checks that no axis of a kernel of attention is of heads, as far as known."""
        leaf = self.leaves.get(self.tree_path_of.get(kernel, ()))
        if leaf is None or leaf.rank < 3:
            return True
        return len(leaf.letters) == 1 and {*"NK"}.isdisjoint(leaf.letters[0])

    def verdicts(self, per_head: bool = False) -> dict[Path, Verdict]:
        """Returns the verdict on every leaf, by its path in the tree."""
        verdicts = {x.tree_path: self._first(x, per_head) for x in self.leaves.values()}
        if not self.is_of_matrices:
            verdicts |= outputs_of(self.leaves, verdicts, self.stacks)
        for tree_path, verdict in verdicts.items():
            stack = self.stacks[tree_path]
            if stack.depth and verdict.numbers is not None and verdict.is_known:
                sizes = map(str, stack.sizes(self.leaf_at[tree_path].shape))
                note = f"; stack of {' x '.join(sizes)} at axis {stack.start}"
                verdicts[tree_path] = verdict._replace(note=note)
        return verdicts

    def _first(self, leaf: FlaxLeaf, per_head: bool) -> Verdict:
        """Returns the verdict of the first rule that holds."""
        array = self.leaf_at[leaf.tree_path]
        if is_masked(array):
            return Verdict("vector", None, "hidden", "hidden")
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return Verdict("vector", None, "no floats")
        is_sure = self.stacks[leaf.tree_path].is_sure
        if not (is_sure or leaf.kind or len(array.shape) < 2):
            return Verdict("matrix", None, "open", is_known=False)
        rules = (*RULES, *(OF_TWO_AXES if leaf.rank == 2 else OF_MORE_AXES))
        verdict = next(filter(None, (rule.verdict(leaf) for rule in rules)))
        if per_head and verdict.kind == "attention" and leaf.role in WITH_HEADS:
            inputs, outputs = sides_of(leaf.letters[0])
            return verdict._replace(numbers=leaf.numbers(inputs, outputs[-1:]))
        return verdict


def _experts(leaves: Collection[FlaxLeaf]) -> dict[Path, Shape]:
    """Returns a router's shape, by its path and those of the experts next to it."""
    last = {x.tree_path: [{*names.words(name)[-1:]} for name in x.path] for x in leaves}
    shapes: dict[Path, Shape] = {}
    for router in (x for x in leaves if x.rank == 2):
        name_words = last[router.tree_path]
        depth = next((i for i, x in enumerate(name_words) if x & names.ROUTERS), None)
        if depth is None:
            continue
        module = router.path[:depth]
        near = [x for x in leaves if x.path[:depth] == module and x != router]
        stacks = [x for x in near if x.rank > 2 and WITH_HEADS.isdisjoint(x.path[-2:])]
        is_router = "router" in name_words[depth] or any(
            word & names.EXPERTS for x in near for word in last[x.tree_path][depth:]
        )
        if is_router or any(x.shape[-3] in router.shape for x in stacks):
            fits = (x for x in stacks if x.shape[-3] == router.shape[1])
            shapes |= {x.tree_path: router.shape for x in fits if not x.is_turned}
            shapes[router.tree_path] = router.shape
    return shapes

"""What a leaf is by its name, its shape and what is next to it: one list of rules.

Leaves are first written as Flax would have them, one layer of each stack: Haiku calls a
kernel `w`, Equinox and Haliax `weight` and keep it as `(out, in)`, others call the
projections of attention `q_proj` or `wq`. So one list of rules serves them all. The
first rule that holds decides, and `outputs` has the rules on what writes the output.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from . import names
from .layers import find_stacks, IN_FRONT, Leaf, leaves_of, StackAxes, without_ones
from .layouts import layouts_of, sides_of, WITH_HEADS
from .outputs import Outputs
from .paths import is_masked, Path, PathedTree, Shape
from .verdict import EitherWay, Verdict


#: Input and output axes, of those of one layer.
Sides = tuple[Iterable[int], Iterable[int]]
_WINDOW = 8  # of a convolution over time, at most
_PATCH = 16  # of any convolution, at most


class Rule(NamedTuple):
    """A kind of leaf, its condition, and what to say of it: a label or axes."""

    kind: str
    holds: Callable[[Leaf], Any]
    label: str  # "asked" is no label: the user is asked
    sides: Callable[[Leaf], Sides] | None = None
    is_sure: Callable[[Leaf], bool] = lambda x: True

    def verdict(self, leaf: Leaf) -> Verdict:
        if self.label == "asked":
            return Verdict("matrix", _guess(leaf), self.kind, is_known=False)
        numbers = self.sides and leaf.numbers(*self.sides(leaf))
        # Biases show which way round weights are, those of others, too.
        is_hidden = leaf.own[-1:] == ("weight",) or leaf.bias == ()
        if numbers and leaf.rank == 2 and leaf.hides and is_hidden:
            numbers = EitherWay(*numbers)
        return Verdict(self.label, numbers, self.kind, is_sure=self.is_sure(leaf))


def is_named(x: Leaf) -> bool:
    """A kernel in a module that has a name, or a bias. A number in a list is no name."""
    return x.is_layer or (x.is_kernel and bool(x.module and not x.module.isdigit()))


def is_small(x: Leaf) -> bool:
    """Two rows may be gains, as FermiNet's, and a norm's size a vector in heads."""
    is_pair = min(x.shape) == 2 and max(x.shape) >= 16
    return not x.is_kernel and not names.is_low_rank(x.path) and (is_pair or x.is_like)


def is_depthwise(x: Leaf) -> bool:
    """One input for each output, in a window; Keras has one output for each input."""
    window = x.shape[1:-1] if x.is_turned else x.shape[:-2]
    is_window = x.is_conv or without_ones(x.bias or ()) == x.shape[-1:]
    is_window |= len(window) > 1 and len({*window}) == 1
    return {*window} != {1} and (
        (x.features == 1 and is_window) or (x.shape[-1] == 1 and x.rank > 2)
    )


def by_bias(x: Leaf) -> list[Sides]:
    """A bias has one entry per output, which separates input axes from output axes."""
    bias = without_ones(x.bias or ())
    return [
        (range(len(bias) - n - x.rank, -n), range(-n, 0))
        for n in range(1, len(bias) + 1)
        if len(bias) < x.rank and bias == x.shape[: len(bias) - n] + x.shape[-n:]
    ]


def as_expert(x: Leaf) -> Sides | None:
    """The sides of a kernel of as many experts as its router has outputs.

    HuggingFace has outputs first in some models: what is called down gives features,
    and what is called up or gate takes them.
    """
    features, count = x.experts or (0, 0)
    if x.rank < 3 or x.shape[-3] != count or features not in x.shape[-2:]:
        return None
    said = {*names.words(x.own[-1]), *names.words(x.module)}
    is_told = said & {"up", "gate", "down"} and x.shape[-2] != x.shape[-1]
    is_turned = is_told and (x.shape[-1] == features) != ("down" in said)
    return ((-1,), (-2,)) if is_turned else ((-2,), (-1,))


INPUTS_OUTPUTS: Sides = ((-2,), (-1,))

RULES: tuple[Rule, ...] = (
    # Vectors, whatever the rank: what is added or multiplied.
    Rule("vector", lambda x: x.rank < 2 or 0 in x.shape, "vector"),
    Rule("bias", lambda x: x.kind == "bias", "vector"),
    # A shift of the same shape makes a gain of it, whatever its name.
    Rule(
        "norm",
        lambda x: x.kind == "norm" or (x.is_layer and x.shape == x.bias),
        "vector",
    ),
    # Tables: what is looked up. With a bias it is a layer, such as patches.
    Rule(
        "embedding",
        lambda x: x.kind == "embedding" and not x.is_layer,
        "embedding",
    ),
    Rule(
        "positions or tokens",
        lambda x: x.kind == "positions or tokens" and not x.is_layer,
        "vector",
    ),
    # One row of weights has no singular values to make even.
    Rule(
        "one output",
        lambda x: (
            x.is_kernel
            and x.rank == 2
            and x.shape[-1] == 1
            and not names.is_low_rank(x.path)
        ),
        "vector",
    ),
    Rule("output head: named so", lambda x: x.kind == "head", "head"),
    Rule("router", lambda x: x.rank == 2 and x.experts, "router"),
    Rule(
        "may be no layer",
        lambda x: x.kind == "no layer" and not (x.is_layer and x.rank > len(x.bias)),
        "asked",
    ),
    # RecurrentGemma: (window, channels).
    Rule(
        "depthwise convolution",
        lambda x: x.rank == 2 and x.is_conv and min(x.shape) <= _WINDOW,
        "vector",
        is_sure=lambda x: False,
    ),
    Rule("open", lambda x: x.rank == 2 and is_small(x), "asked"),
    Rule(
        "outputs first",
        lambda x: x.rank == 2 and x.is_turned,
        "matrix",
        lambda x: INPUTS_OUTPUTS,
        is_named,
    ),
    Rule(
        "inputs, outputs",
        lambda x: x.rank == 2,
        "matrix",
        lambda x: INPUTS_OUTPUTS,
        is_named,
    ),
    # Norms and biases, which a mask hides, would show stacks and windows.
    Rule("open", lambda x: x.hides and x.own[-1:] == ("weight",), "asked"),
    Rule(
        "open",
        lambda x: (
            x.hides
            and x.role in WITH_HEADS
            and x.rank > 3
            and "L" not in "".join(x.letters[:1])
        ),
        "asked",
    ),
    # Kernels of attention, of pairs, of experts: their shapes together decide.
    Rule(
        "attention",
        lambda x: len(x.letters) == 1 and x.role in (*WITH_HEADS, "out"),
        "matrix",
        lambda x: sides_of(x.letters[0]),
    ),
    Rule(
        "shapes together",
        lambda x: len(x.letters) == 1,
        "matrix",
        lambda x: sides_of(x.letters[0]),
    ),
    Rule("open", lambda x: x.letters, "asked"),
    Rule("experts of a router", as_expert, "matrix", as_expert),
    Rule("open", lambda x: not x.is_kernel, "asked"),
    Rule(
        "open",
        lambda x: x.is_turned and max(x.shape[1:-1]) > _PATCH and not x.bias,
        "asked",
    ),
    Rule("depthwise convolution", is_depthwise, "vector", is_sure=lambda x: False),
    Rule(
        "convolution",
        lambda x: (
            x.is_conv
            and not x.bias
            and (
                x.bias is None
                or not x.hides
                or x.rank < 4
                or (x.rank == 4 and x.shape[0] == x.shape[1])
            )
        ),
        "matrix",
        lambda x: (range(-x.rank, -1), (-1,)),
    ),
    Rule(
        "convolution",
        lambda x: x.is_conv and len(by_bias(x)) == 1,
        "matrix",
        lambda x: by_bias(x)[0],
    ),
    Rule(
        "bias shape",
        lambda x: (
            len(by_bias(x)) == 1
            and (x.is_turned or x.shape[0] != without_ones(x.bias)[0])
        ),
        "matrix",
        lambda x: by_bias(x)[0],
    ),
    Rule(
        "one layer",
        lambda x: not x.bias and {*x.shape[:-2]} == {1},
        "matrix",
        lambda x: INPUTS_OUTPUTS,
    ),
    Rule("open", lambda x: True, "asked"),
)


def _guess(leaf: Leaf) -> Any:
    """Axes to be checked by the user."""
    rank, shape, name = leaf.rank, leaf.shape, leaf.module
    inputs, outputs = tuple(range(-rank, -1)), (-1,)
    is_square = rank > 3 and len({*shape[:-2]}) == 1
    if rank == 3 and name in WITH_HEADS:
        inputs, outputs = (-3,), (-2, -1)
    elif rank > 2 and leaf.is_turned:
        # What PyTorch calls a weight is a window, or a stack of kernels.
        if max(shape[1:-1]) > _PATCH:
            inputs, outputs = (-3,), (-2,)
    elif not (rank == 3 and name == "out") and not is_square:
        inputs = (-2,)
    return leaf.numbers(inputs, outputs)


class ByNames:
    """The leaves of a tree in Flax's words, and what each is."""

    def __init__(self, tree: PathedTree, stack_axes: StackAxes = IN_FRONT):
        self.leaf_at = tree.by_path()
        self.stacks = find_stacks(self.leaf_at, stack_axes, tree.axis_names)
        self._shape = {
            path: () if is_masked(leaf) else tuple(leaf.shape)
            for path, leaf in self.leaf_at.items()
        }
        axes: dict[Path, tuple[int, ...]] = {}  # of one layer
        for path, (start, depth) in self.stacks.items():
            rank, stacked = len(self._shape[path]), range(start, start + depth)
            axes[path] = tuple(i - rank for i in range(rank) if i not in stacked)
        leaves = leaves_of(self._shape, axes)
        for own, axis_names in tree.axis_names.items():
            if "vocab" in axis_names:
                axis = axis_names.index("vocab") - len(axis_names)
                kind = "embedding" if axis == leaves[own].axes[0] else "head"
                leaves[own] = leaves[own]._replace(kind=kind)
        # A mask of matrices hides vectors, and heads with them.
        hidden = (path for path, x in self.leaf_at.items() if is_masked(x))
        hides = any(
            names.is_norm(p) or names.kind(p) == "bias" or p[-1:] == ("b",)
            for p in hidden
        )
        layouts, experts = layouts_of(leaves.values()), _experts(leaves.values())
        widths = {x.shape[0] for x in leaves.values() if x.kind == "norm" and x.shape}
        for own, leaf in leaves.items():
            role, letters = layouts.get(own, ("", ()))
            leaves[own] = leaf._replace(
                role=role,
                letters=letters,
                experts=experts.get(own),
                is_like=math.prod(leaf.shape) in widths,
                hides=hides,
            )
        self.leaves: Mapping[Path, Leaf] = leaves
        self.own = {leaf.path: own for own, leaf in leaves.items()}

    def lacks_heads(self, kernel: Path) -> bool:
        """Checks that no axis of a kernel of attention is of heads, as far as known."""
        leaf = self.leaves.get(self.own.get(kernel, ()))
        if leaf is None or leaf.rank < 3:
            return True
        return len(leaf.letters) == 1 and {*"NK"}.isdisjoint(leaf.letters[0])

    def verdicts(self, per_head: bool = False) -> dict[Path, Verdict]:
        """Returns the verdict on every leaf, by its own path."""
        found: dict[Path, Verdict] = {}
        for own, leaf in self.leaves.items():
            array = self.leaf_at[own]
            if is_masked(array):
                found[own] = Verdict("vector", None, "hidden", "hidden")
            elif not jnp.issubdtype(array.dtype, jnp.inexact):
                found[own] = Verdict("vector", None, "no floats")
            else:
                rule = next(rule for rule in RULES if rule.holds(leaf))
                found[own] = rule.verdict(leaf)
                if per_head and rule.kind == "attention" and leaf.role in WITH_HEADS:
                    inputs, outputs = sides_of(leaf.letters[0])
                    numbers = leaf.numbers(inputs, outputs[-1:])
                    found[own] = found[own]._replace(numbers=numbers)
        found |= _like_neighbors(self.leaves, found)
        if not any(x.hides for x in self.leaves.values()):
            found |= Outputs(self.leaves, found, self.stacks).found()
        for own, verdict in found.items():
            stack = self.stacks[own]
            if stack.depth and verdict.numbers is not None and verdict.is_known:
                sizes = " x ".join(map(str, stack.sizes(self._shape[own])))
                note = f"; stack of {sizes} at axis {stack.start}"
                found[own] = verdict._replace(note=note)
        return found


def _like_neighbors(
    leaves: Mapping[Path, Leaf], found: Mapping[Path, Verdict]
) -> dict[Path, Verdict]:
    """Arrays of the shape of a kernel in their module, or of part of an open leaf.

    A mask or a scale of the kernel has its shape, and a vector for each head has the
    last two axes of the kernel with heads.
    """
    shapes = set()
    for own, leaf in leaves.items():
        at = leaf.path[:-1]
        if leaf.is_kernel:
            shapes.add((at, leaf.shape))
        if found[own].kind == "open":
            shapes |= {(at, leaf.shape[:2]), (at, leaf.shape[-2:])}
    return {
        own: Verdict("matrix", _guess(leaf), "open", is_known=False)
        for own, leaf in leaves.items()
        if found[own].label == "matrix" and not leaf.is_kernel
        if (leaf.path[:-1], leaf.shape) in shapes
    }


def _experts(leaves: Iterable[Leaf]) -> dict[Path, tuple[int, int]]:
    """How many features experts take and how many they are: of routers and experts."""
    counts: dict[Path, set[int]] = {}  # below each module; 0 if they have numbers
    for leaf in leaves:
        is_stack = leaf.rank > 2 and WITH_HEADS.isdisjoint(leaf.path[-2:])
        for depth, name in enumerate(leaf.path):
            if is_stack or names.words(name)[-1:] in (("expert",), ("experts",)):
                count = leaf.shape[-3] if leaf.rank > 2 else 0
                counts.setdefault(leaf.path[:depth], set()).add(count)
    found: dict[Path, tuple[int, int]] = {}
    places: dict[Path, Shape] = {}
    for leaf in leaves:
        called = [x for x in leaf.path if not x.isdigit()]
        called = called[: len(called) - leaf.is_kernel]
        called = called[:-1] if called[-2:-1] == ["gates"] else called
        last = names.words("".join(called[-1:]))[-1:]
        at = leaf.path[: leaf.path.index(called[-1])] if called else ()
        is_gate = last in (("gate",), ("gates",)) and {0, *leaf.shape} & counts.get(
            at, set()
        )
        if leaf.rank == 2 and leaf.shape[-1] > 1 and (last == ("router",) or is_gate):
            found[leaf.own] = leaf.shape
            places[at] = leaf.shape
    for leaf in leaves:
        for at, shape in places.items():
            if leaf.rank > 2 and leaf.path[: len(at)] == at and not leaf.is_turned:
                if leaf.shape[-3] == shape[-1] and shape[0] in leaf.shape[-2:]:
                    found[leaf.own] = shape
    return found

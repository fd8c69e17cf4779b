"""Every leaf read by its name, its shape and what is next to it: a matrix or not.

Leaves are first written as Flax would have them, one layer of each stack: Haiku calls a
kernel `w`, Equinox and Haliax `weight` and keep it as `(out, in)`, others call the
projections of attention `q_proj` or `wq`. Read like this, one list of rules serves them
all. A leaf that no rule decides is open, and the caller asks.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from . import names
from .names import without_ones
from .paths import is_masked, Path, PathedTree, Shape
from .stacks import find_stacks, IN_FRONT, StackAxes


_WINDOW = 8  # of a convolution over time, at most
_PATCH = 16  # of any convolution, at most
_COLORS = 4  # at most, with transparency


class EitherWay(MuonDimensionNumbers):
    """Dimension numbers of either direction: a mask hides the bias that would tell."""


class Verdict(NamedTuple):
    """A leaf's dimension numbers, `None` for AdamW, and what says so."""

    numbers: MuonDimensionNumbers | None
    why: str
    is_sure: bool = True
    label: str = "vector"  # of what goes to AdamW
    is_open: bool = False  # nothing decides; the numbers are what they may be


class Leaf(NamedTuple):
    """A leaf in Flax's words, `(inputs..., outputs...)` in one layer."""

    own: Path
    path: Path
    shape: Shape
    axes: tuple[int, ...]  # of the leaf, from the end, for those of the shape
    bias: Shape | None  # next to it; of no axes where a mask hides it
    module: str
    is_kernel: bool
    is_conv: bool
    is_turned: bool = False  # the leaf has its outputs first
    is_open: bool = False  # nothing tells which of its axes are outputs

    def numbers(self, inputs: Iterable[int], outputs: Iterable[int]):
        """Dimension numbers of the leaf, from axes of the shape."""
        sides = (tuple(self.axes[i] for i in axes) for axes in (inputs, outputs))
        return MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in sides))


class ByNames:
    """The leaves of a tree in Flax's words, and what each is."""

    def __init__(self, tree: PathedTree, stack_axes: StackAxes = IN_FRONT):
        self.leaf_at, self._axis_names = tree.by_path(), tree.axis_names
        self.stacks = find_stacks(self.leaf_at, stack_axes, tree.axis_names)
        self._shape = {
            path: () if is_masked(leaf) else tuple(leaf.shape)
            for path, leaf in self.leaf_at.items()
        }
        axes: dict[Path, tuple[int, ...]] = {}  # of one layer
        for path, (start, depth) in self.stacks.items():
            rank, stacked = len(self._shape[path]), range(start, start + depth)
            axes[path] = tuple(i - rank for i in range(rank) if i not in stacked)
        self.leaves = _leaves_of(self._shape, axes)
        self.shapes = {leaf.path: leaf.shape for leaf in self.leaves.values()}
        self.own = {leaf.path: own for own, leaf in self.leaves.items()}
        # A mask of matrices hides vectors, and heads next to them.
        hidden = (path for path, x in self.leaf_at.items() if is_masked(x))
        self._is_whole = not any(names.kind(p) in ("bias", "norm") for p in hidden)
        self._widths = {
            leaf.shape[0]
            for leaf in self.leaves.values()
            if len(leaf.shape) == 1 and names.kind(leaf.path) == "norm"
        }
        # How many experts are below each module; 0 for such as have a number each.
        experts: dict[Path, set[int]] = {}
        for path, shape in self.shapes.items():
            for depth, name in enumerate(path):
                if name == "experts" or len(shape) > 2:
                    count = shape[-3] if len(shape) > 2 else 0
                    experts.setdefault(path[:depth], set()).add(count)
        # Where the experts of each router are, and its shape, by its path.
        self._routers: dict[Path, tuple[Path, Shape]] = {}
        for own, leaf in self.leaves.items():
            for at, name in enumerate(leaf.path if len(leaf.shape) == 2 else ()):
                last = names.words(name)[-1:]
                is_gate = last == ("gate",) and at > len(leaf.path) - 3
                counts = experts.get(leaf.path[:at], set())
                if last == ("router",) or (is_gate and {0, *leaf.shape} & counts):
                    self._routers[own] = leaf.path[:at], leaf.shape

    @functools.cached_property
    def _layouts(self) -> dict[Path, tuple[str, list[str]]]:
        return _layouts_of(self.leaves.values())

    def lacks_heads(self, kernel: Path) -> bool:
        """Checks that no axis of a kernel of attention is of heads, as far as known."""
        _, letters = self._layouts.get(kernel, ("", []))
        is_flat = len(letters) == 1 and {*"NK"}.isdisjoint(letters[0])
        return is_flat or len(self.shapes.get(kernel, ())) < 3

    def verdicts(self, per_head: bool = False) -> dict[Path, Verdict]:
        """Returns the verdict on every leaf, by its own path."""
        found = {}
        for own, leaf in self.leaves.items():
            array = self.leaf_at[own]
            if is_masked(array):
                found[own] = Verdict(None, "hidden")
            elif not jnp.issubdtype(array.dtype, jnp.inexact):
                found[own] = Verdict(None, "no floats")
            else:
                found[own] = self._verdict(leaf, per_head)
        kernels = [
            leaf
            for own, leaf in self.leaves.items()
            if len(leaf.shape) == 2 and leaf.is_kernel and leaf.path[1:]
            if found[own].numbers is not None and not found[own].is_open
        ]
        if kernels and self._is_whole:
            found |= self._unnamed_heads(kernels, found)
        for own, verdict in found.items():
            stack = self.stacks[own]
            if stack.depth and verdict.numbers is not None and not verdict.is_open:
                sizes = " x ".join(map(str, stack.sizes(self._shape[own])))
                why = f"{verdict.why}; stack of {sizes} at axis {stack.start}"
                found[own] = verdict._replace(why=why)
        return found

    def _verdict(self, leaf: Leaf, per_head: bool) -> Verdict:
        """The rules on one leaf, in their order; heads without a name come after."""
        own, path, shape, rank = leaf.own, leaf.path, leaf.shape, len(leaf.shape)
        is_kernel, is_conv, module = leaf.is_kernel, leaf.is_conv, leaf.module
        has_bias, bias = leaf.bias is not None, leaf.bias or ()
        # A checkpoint of PyTorch has the whole path in one name.
        dotted = tuple(".".join(own).split("."))
        kind, kind_written = names.kind(dotted), names.kind(path)

        # Vectors, whatever the rank: what is added or multiplied.
        if rank < 2 or 0 in shape:
            return Verdict(None, "vector")
        if "bias" in (kind, kind_written):
            return Verdict(None, "bias")
        # A shift of the same shape makes a gain of it, whatever its name.
        is_gain = path[-1:] and path[-1] in names.KERNELS and shape == bias
        if kind_written == "norm" or kind == "gain" or is_gain:
            return Verdict(None, "norm")

        # Tables: what is looked up. With a bias it is a layer, such as patches.
        axis_names = self._axis_names.get(own, ())
        if "vocab" in axis_names:
            first = axis_names.index("vocab") - len(axis_names) == leaf.axes[0]
            kind = "embedding" if first else "head"
        is_layer = is_kernel and has_bias
        if kind in ("embedding", "positions or tokens") and not is_layer:
            # One row is added to activations, nothing looks it up.
            is_table = kind == "embedding" and shape[0] > 1
            return Verdict(None, kind, label="embedding" if is_table else "vector")
        if kind == "logarithms":
            return Verdict(None, kind)
        if "head" in (kind, kind_written):
            return Verdict(None, "output head: named so", label="head")
        if own in self._routers:
            # One number is the gate of the shared expert.
            return Verdict(None, "router", label="vector" if 1 in shape else "router")

        # One row of weights has no singular values to make even.
        is_row = is_kernel and shape[-1] == 1 and not leaf.is_open
        if rank == 2:
            if is_row and not names.is_low_rank(path):
                return Verdict(None, "one output")
            is_number = not names.NUMBERS_OF_HEADS.isdisjoint(own[-2:-1])
            if is_number and (*own[:-2], "A_log") in self._shape:
                # Steps and decays of linear attention, one number for each head: Qwen
                # trains them by AdamW, others by Muon.
                return self._open(leaf)
            if is_conv and min(shape) <= _WINDOW:
                # RecurrentGemma: (window, channels)
                return Verdict(None, "depthwise convolution", is_sure=False)
            # Under a name that says nothing, two gains for each of many features, or
            # many for two, are as likely: FermiNet's `sigma`, a pooling query.
            # So is one of a norm's size: a vector in heads, as RWKV's bonus.
            # One row alone may be the block of a matrix that `shard_map` cuts.
            is_small = min(shape) == 2 and max(shape) >= 16
            is_small |= math.prod(shape) in self._widths
            if is_small and not is_kernel and not names.is_low_rank(path):
                return self._open(leaf)
            why = "outputs first" if leaf.is_turned else "inputs, outputs"
            # The number of a layer says nothing, and a gain over two axes may be one.
            is_sure = is_kernel and (has_bias or bool(module and not module.isdigit()))
            numbers = leaf.numbers((-2,), (-1,))
            # Biases tell which way round weights are, those of others, too.
            hides = own[-1:] == ("weight",) or (has_bias and not bias)
            if hides and not self._is_whole:
                numbers = EitherWay(*numbers)
            return Verdict(numbers, why, is_sure)
        if not self._is_whole and own[-1:] == ("weight",):
            return self._open(leaf)

        # Kernels of attention, of pairs, of experts: their shapes together tell.
        role, letters = self._layouts.get(path, ("", []))
        has_heads = role in names.WITH_HEADS
        # Norms, which the mask hides, would show a stack.
        hides = has_heads and rank > 3 and not self._is_whole
        if len(letters) == 1 and ("L" in letters[0] or not hides):
            inputs, outputs = _sides(letters[0])
            outputs = outputs[-1:] if per_head and has_heads else outputs
            why = "attention" if has_heads or role == "out" else "shapes together"
            return Verdict(leaf.numbers(inputs, outputs), why)
        if letters or hides:
            return self._open(leaf)
        for place, (features, experts) in self._routers.values():
            is_inside = path[: len(place)] == place and not leaf.is_open
            if is_inside and shape[-3] == experts and features in shape[-2:]:
                # HuggingFace keeps outputs first in some models: what is called down
                # gives features, and what is called up or gate takes them.
                said = {*names.words(own[-1]), *names.words(module)}
                is_told = said & {"up", "gate", "down"} and shape[-2] != shape[-1]
                is_turned = is_told and (shape[-1] == features) != ("down" in said)
                sides = ((-1,), (-2,)) if is_turned else ((-2,), (-1,))
                return Verdict(leaf.numbers(*sides), "experts of a router")
        if not is_kernel:
            return self._open(leaf)

        # Windows: one with one input for each output, depthwise, is no matrix.
        inner, window = shape[-2], shape[:-2]
        if leaf.is_turned:  # its outputs were in front, then its inputs
            inner, window = shape[0], shape[1:-1]
        is_window = is_conv or without_ones(bias) == shape[-1:]
        is_window |= len(window) > 1 and len(set(window)) == 1
        if inner == 1 and is_window and set(window) != {1} and not leaf.is_open:
            return Verdict(None, "depthwise convolution", is_sure=False)
        if is_row and set(window) != {1}:  # Keras' depthwise: one for each input
            return Verdict(None, "one output")

        # A bias has one entry per output, which tells input axes from output axes.
        bias = without_ones(bias)
        fitting = [
            leaf.numbers(range(len(bias) - n - rank, -n), range(-n, 0))
            for n in range(1, len(bias) + 1)
            if len(bias) < rank and bias == shape[: len(bias) - n] + shape[-n:]
        ]
        # Both ends may be the outputs: NetKet keeps them in front. Conv does not.
        is_either = bias == shape[: len(bias)] and not is_conv and not leaf.is_turned
        if len(fitting) == 1 and not is_either:
            return Verdict(fitting[0], "bias tells")
        if bias or leaf.is_open:
            return self._open(leaf)
        # A hidden bias would distinguish scanned convolutions from those of more axes.
        is_told = rank < 4 or (rank == 4 and shape[0] == shape[1])
        if is_conv and (is_told or self._is_whole or not has_bias):
            return Verdict(leaf.numbers(range(-rank, -1), (-1,)), "convolution")
        if set(shape[:-2]) == {1}:
            return Verdict(leaf.numbers((-2,), (-1,)), "one layer")
        return self._open(leaf)

    def _open(self, leaf: Leaf) -> Verdict:
        """A guess to be checked by the user."""
        rank, name = len(leaf.shape), leaf.module
        inputs, outputs = tuple(range(-rank, -1)), (-1,)
        if rank == 3 and name in names.WITH_HEADS:
            inputs, outputs = (-3,), (-2, -1)
        elif leaf.is_open and max(leaf.shape[2:]) <= _PATCH:  # as PyTorch has it
            inputs, outputs = tuple(i + 1 for i in inputs), inputs[:1]
        elif not (rank == 3 and name == "out") and (
            rank < 4 or len(set(leaf.shape[:-2])) > 1
        ):
            inputs = (-2,)
        return Verdict(leaf.numbers(inputs, outputs), "open", is_open=True)

    def _unnamed_heads(
        self, kernels: Sequence[Leaf], verdicts: Mapping[Path, Verdict]
    ) -> dict[Path, Verdict]:
        """The kernels that write the output though they are not called a head.

        They have the size of the vocabulary, or nothing takes what they give: their
        outputs are the input of no other leaf. Layers of repeated blocks are none.
        """
        taken, unfolded = set(), set()
        for own, verdict in verdicts.items():
            leaf = self.leaves[own]
            if verdict.numbers is not None:
                axes = verdict.numbers.reduction_axis
                axes = (axes,) if isinstance(axes, int) else axes
                channels = leaf.shape[0 if leaf.is_turned else -2]
                # Neither the window nor the colors of a picture are features.
                is_window = len(axes) > (1 if leaf.is_conv else 2)
                inputs = math.prod(self._shape[own][i] for i in axes)
                if not is_window or channels > _COLORS:
                    taken.add(channels if is_window else inputs)
                if is_window and "transpose" in leaf.module.lower():
                    unfolded.add(channels)
            elif leaf.shape and verdict.label == "head":
                taken.add(leaf.shape[0])
            elif leaf.shape and names.kind(leaf.path) in ("norm", "embedding"):
                taken.add(leaf.shape[-1])
        alike = Counter(map(_twin, self.leaves.values()))
        alone = {
            leaf.own
            for leaf in kernels
            if alike[_twin(leaf)] < 2 and not self.stacks[leaf.own].depth
        }
        labels = {own: verdict.label for own, verdict in verdicts.items()}
        tables = [
            leaf
            for own, leaf in self.leaves.items()
            if labels[own] == "embedding" and len(leaf.shape) == 2
        ]
        found: dict[Path, Verdict] = {}

        # With as many outputs as there are tokens: the last layer next to the table, or
        # at the root, else those that no layer takes.
        last: list[Leaf] = []
        if "head" not in labels.values():
            in_order = sorted(kernels, key=_in_order)
            unnamed = [x for x in in_order if names.UNNAMED.fullmatch(x.module)]
            last = list({x.path[:-2]: x for x in unnamed}.values())
            sizes = {x.shape[0] for x in tables if x.shape[0] != x.shape[1]} - taken
            turned = {(at, x.shape[::-1]) for x in tables for at in (x.path[:-2], ())}
            of_vocabulary = [x for x in last if (x.path[:-2], x.shape) in turned] or [
                x for x in kernels if x.shape[1] in sizes and x.own in alone
            ]
            why = "output head: as large as the vocabulary"
            head = Verdict(None, why, is_sure=False, label="head")
            found = {x.own: head for x in of_vocabulary if not self.stacks[x.own].depth}

        why = "output head: nothing takes its outputs"
        head = Verdict(None, why, is_sure=False, label="head")
        n_matrices = sum(x.numbers is not None for x in verdicts.values())
        has_windows = any(len(x.shape) > 3 for x in self.leaves.values())
        for leaf in kernels:
            (features, outputs), parent = leaf.shape, leaf.path[:-2]
            is_inside = not names.IN_BLOCK.isdisjoint(names.words(leaf.module))
            if outputs in taken - {1} or is_inside or leaf.own in found:
                continue
            # Fused projections and gates are taken apart: parts are taken.
            parts = {outputs // n for n in (2, 3, 4) if outputs % n == 0}
            is_parts = parent and (outputs % features == 0 or taken & parts)
            is_last = leaf.bias is not None and leaf.own in alone and not is_parts
            if outputs == 1 or (is_last and n_matrices > (1 if has_windows else 2)):
                # A decoder of pictures may unfold them to a first transposed window.
                is_unfolded = any(outputs % size == 0 for size in unfolded)
                found[leaf.own] = self._open(leaf) if is_unfolded else head

        # Nothing tells of one layer of any name next to the whole model, though as many
        # features are taken elsewhere, nor of what is called a head and writes features
        # that another part takes: the pictures' of PaliGemma, the texts' of SigLIP.
        is_one = sum(len(x.path) == 2 for x in kernels) == 1 < len(kernels)
        is_headless = is_one and not found and not tables
        unsure = [x for x in last if len(x.path) == 2 and is_headless]
        unsure += [
            leaf
            for own, leaf in self.leaves.items()
            if labels[own] == "head" and leaf.path[:-2] and leaf.module == "head"
            if leaf.shape[-1] in taken
        ]
        return found | {leaf.own: self._open(leaf) for leaf in unsure}


def _leaves_of(
    shapes: Mapping[Path, Shape], axes_of: Mapping[Path, tuple[int, ...]]
) -> dict[Path, Leaf]:
    """One layer of each leaf in Flax's words, turned where its outputs come first."""
    layers = {own: tuple(shapes[own][i] for i in axes) for own, axes in axes_of.items()}
    written = names.in_flax(layers)
    by_path = {path: layers[own] for own, path in written.items()}
    biases = {own: by_path.get((*x[:-1], "bias")) for own, x in written.items()}
    kernels = {own for own, x in written.items() if x[-1:] == ("kernel",)}
    weights = {x for x in layers if "weight" in ".".join(x[-2:]).split(".")[-2:]}

    def is_turned(own: Path) -> bool | None:
        """Compares a kernel with its bias, which has its outputs."""
        shape, bias = layers[own], without_ones(biases[own] or ())
        first, last = shape[: len(bias)] == bias, shape[-len(bias) :] == bias
        return first if first != last and 0 < len(bias) < len(shape) else None

    # What is called a weight has its outputs first in Equinox and Haliax.
    votes = [is_turned(own) for own in kernels & weights]
    weights_turned = votes.count(True) >= votes.count(False)
    found: dict[Path, Leaf] = {}
    for own, path in written.items():
        shape, axes, bias = layers[own], axes_of[own], biases[own]
        is_weight, module = own in kernels & weights, "".join(path[-2:-1])
        in_attention = module in ("query", "key", "value", "out")
        is_open = is_weight and len(shape) > 2 and not bias
        is_conv = bool(names.CONVOLUTION.search(module))
        is_open &= not (in_attention or is_conv)
        # Layers of rank 2 may be turned, too: HuggingFace's GPT-2, recurrent cells in
        # Equinox; and the first of pairs in stax.
        is_layer = own in kernels or "".join(own[-1:]).startswith(("weight_", "w_"))
        may_turn = own in weights or own[-1:] == ("0",)
        may_turn |= len(shape) == 2 and is_layer
        by = 0
        if may_turn and len(without_ones(bias or ())) < len(shape) > 1:
            turned = is_turned(own)
            if turned:
                by = len(without_ones(bias or ()))
            elif turned is None and is_weight and not is_open and weights_turned:
                by = len(shape) - 1 if in_attention and module != "out" else 1
                by *= names.kind(own) != "embedding"
        shape, axes = shape[by:] + shape[:by], axes[by:] + axes[:by]
        kinds = module, own in kernels, is_conv
        found[own] = Leaf(own, path, shape, axes, bias, *kinds, bool(by), is_open)
    return found


def _layouts_of(leaves: Iterable[Leaf]) -> dict[Path, tuple[str, list[str]]]:
    """The role of every kernel that a layout may name, and the letters that fit it.

    Several if layouts fit that take the kernel apart differently.
    """
    known = {role for layout in names.LAYOUTS for role in layout}
    modules: dict[Path, dict[str, Leaf]] = {}
    for leaf in leaves:
        at = len(leaf.path) - 1 - leaf.is_kernel
        name = "".join(leaf.path[at : at + 1])
        if name in known and leaf.shape:
            modules.setdefault(leaf.path[:at], {})[name] = leaf
    found: dict[Path, tuple[str, list[str]]] = {}
    for members in modules.values():
        fitting: list[list[dict[str, str]]] = [[], [], []]
        is_general = max(len(leaf.shape) for leaf in members.values()) > 2
        for layout in names.LAYOUTS if is_general else ():
            if not members.keys() <= layout.keys():
                continue
            pairs = [(layout[role], leaf.shape) for role, leaf in members.items()]
            # A bias has the outputs of its kernel, and its layers.
            pairs += [
                ("".join(x for x in layout[role] if not x.islower()), leaf.bias)
                for role, leaf in members.items()
                if leaf.bias and leaf.is_kernel
            ]
            size: dict[str, int] = {}
            fits = all(len(letters) == len(shape) for letters, shape in pairs)
            fits = fits and all(
                size.setdefault(x, int(x) if x.isdigit() else n) == n
                for letters, shape in pairs
                for x, n in zip(letters.upper(), shape, strict=True)
            )
            for whole, *parts in ("MNV", "NKG"):
                if fits and {whole, *parts} <= size.keys():
                    fits = size[whole] == math.prod(size[x] for x in parts)
            # Most outputs are as wide as what came in. Features as many as heads hold
            # would be a coincidence in a stack; and in Flax a query without a value has
            # heads.
            features, heads = size.get("D", 0), size.get("N", 0)
            of_width = size.get("E", features) == features
            is_likely = features == heads * size.get("H", 0)
            is_likely |= "value" not in members and features >= heads
            is_likely &= "L" not in "".join(layout.values())
            for is_so, those in zip((is_likely, True, True), fitting, strict=True):
                if fits and is_so and (of_width or those is fitting[2]):
                    those.append(layout)
        likeliest = next((those for those in fitting if those), [])
        for role, leaf in members.items():
            letters = {_sides(x): x for x in (layout[role] for layout in likeliest)}
            found[leaf.path] = role, list(letters.values())
    return found


def _sides(letters: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Input and output axes of a kernel in a layout, from the end."""
    axes = [(i - len(letters), x) for i, x in enumerate(letters) if x != "L"]
    return (
        tuple(i for i, x in axes if x.islower()),
        tuple(i for i, x in axes if x.isupper()),
    )


def _twin(leaf: Leaf) -> tuple[Path, Shape]:
    """A key that a leaf shares with the same one of other numbered blocks."""
    modules = (re.sub(r"\d+$", "#", name) for name in leaf.path[:-2])
    return (*modules, *leaf.path[-2:]), leaf.shape


def _in_order(leaf: Leaf) -> list[tuple[bool, int, str]]:
    """`Dense_10` after `Dense_9`, `linear` before `linear_1`, `out` at the end."""
    return [
        (name in ("out", "output"), int(re.sub(r"\D", "", name) or 0), name)
        for name in leaf.path
    ]

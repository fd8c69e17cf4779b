"""Every leaf read by its name, its shape and what is in its module: a matrix or not.

Leaves are first written as Flax would have them, one layer of each stack: Haiku calls a
kernel `w`, Equinox and Haliax `weight` and keep it as `(out, in)`, others call the
projections of attention `q_proj` or `wq`. Read like this, one list of rules serves them
all. A leaf that no rule decides is open, and the caller asks.
"""

import functools
import math

import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from . import names
from .layers import find_stacks, IN_FRONT, Leaf, leaves_of, StackAxes, without_ones
from .layouts import layouts_of, sides_of, WITH_HEADS
from .outputs import Outputs
from .paths import is_masked, Path, PathedTree, Shape
from .verdict import Verdict


_WINDOW = 8  # of a convolution over time, at most
_PATCH = 16  # of any convolution, at most


#: Why a leaf is asked about: nothing says what its axes are.
OPEN = "open"


class EitherWay(MuonDimensionNumbers):
    """Dimension numbers of either direction: a mask hides the bias that decides."""


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
        self.leaves = leaves_of(self._shape, axes)
        self.shapes = {leaf.path: leaf.shape for leaf in self.leaves.values()}
        self.own = {leaf.path: own for own, leaf in self.leaves.items()}
        # A mask of matrices hides vectors, and heads with them.
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
            is_stack = len(shape) > 2 and WITH_HEADS.isdisjoint(path[-2:])
            for depth, name in enumerate(path):
                if is_stack or names.words(name)[-1:] in (("expert",), ("experts",)):
                    count = shape[-3] if len(shape) > 2 else 0
                    experts.setdefault(path[:depth], set()).add(count)
        # Where the experts of each router are, and its shape, by its path.
        self._routers: dict[Path, tuple[Path, Shape]] = {}
        for own, leaf in self.leaves.items():
            for at, name in enumerate(leaf.path if len(leaf.shape) == 2 else ()):
                last = names.words(name)[-1:]
                below = [x for x in leaf.path[at + 1 :] if not x.isdigit()]
                is_gate = last in (("gate",), ("gates",))
                is_gate &= len(below) < (3 if last == ("gates",) else 2)
                counts = experts.get(leaf.path[:at], set())
                if last == ("router",) or (is_gate and {0, *leaf.shape} & counts):
                    self._routers[own] = leaf.path[:at], leaf.shape

    @functools.cached_property
    def _layouts(self) -> dict[Path, tuple[str, list[str]]]:
        return layouts_of(self.leaves.values())

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
                found[own] = adamw("hidden")
            elif not jnp.issubdtype(array.dtype, jnp.inexact):
                found[own] = adamw("no floats")
            else:
                found[own] = self._verdict(leaf, per_head)
        found |= self._like_neighbors(found)
        if self._is_whole and len(self.leaves) > 1:
            found |= Outputs(self.leaves, found, self.stacks).found()
        for own, verdict in found.items():
            stack = self.stacks[own]
            if stack.depth and verdict.numbers is not None and verdict.is_known:
                sizes = " x ".join(map(str, stack.sizes(self._shape[own])))
                why, doubt, _ = verdict.why.partition("?")
                why = f"{why}; stack of {sizes} at axis {stack.start}{doubt}"
                found[own] = verdict._replace(why=why)
        return found

    def _like_neighbors(self, found: dict[Path, Verdict]) -> dict[Path, Verdict]:
        """Arrays of the shape of a kernel in their module, or of part of an open leaf.

        A mask or a scale of the kernel has its shape, and a vector for each head has
        the last two axes of the kernel with heads.
        """
        shapes = set()
        for own, leaf in self.leaves.items():
            at = leaf.path[:-1]
            if leaf.is_kernel:
                shapes.add((at, leaf.shape))
            if found[own].why == OPEN:
                shapes |= {(at, leaf.shape[:2]), (at, leaf.shape[-2:])}
        return {
            own: self._asked(leaf)
            for own, leaf in self.leaves.items()
            if found[own].label == "matrix" and not leaf.is_kernel
            if (leaf.path[:-1], leaf.shape) in shapes
        }

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
            return adamw("vector")
        if "bias" in (kind, kind_written):
            return adamw("bias")
        # A shift of the same shape makes a gain of it, whatever its name.
        is_gain = path[-1:] and path[-1] in names.KERNELS and shape == bias
        if kind_written == "norm" or kind == "gain" or is_gain:
            return adamw("norm")

        # Tables: what is looked up. With a bias it is a layer, such as patches.
        axis_names = self._axis_names.get(own, ())
        if "vocab" in axis_names:
            first = axis_names.index("vocab") - len(axis_names) == leaf.axes[0]
            kind = "embedding" if first else "head"
        is_layer = is_kernel and has_bias
        if kind in ("embedding", "positions or tokens") and not is_layer:
            # One row is added to activations, nothing looks it up.
            is_table = kind == "embedding" and shape[0] > 1
            return adamw(kind, "embedding" if is_table else "vector")
        if kind == "logarithms":
            return adamw(kind)
        if "head" in (kind, kind_written):
            return adamw("output head: named so", "head")
        if own in self._routers:
            # One number is the gate of the shared expert.
            return adamw("router", "vector" if 1 in shape else "router")
        if kind_written == "no layer" and not (
            is_kernel and has_bias and rank > len(bias)
        ):
            return adamw("may be no layer")._replace(is_known=False)

        # One row of weights has no singular values to make even.
        is_row = is_kernel and shape[-1] == 1
        if rank == 2:
            if is_row and not names.is_low_rank(path):
                return adamw("one output")
            if is_conv and min(shape) <= _WINDOW:
                # RecurrentGemma: (window, channels)
                return adamw("depthwise convolution?")
            # Under a name that says nothing, two gains for each of many features, or
            # many for two, are as likely: FermiNet's `sigma`, a pooling query.
            # So is one of a norm's size: a vector in heads, as RWKV's bonus.
            # One row alone may be the block of a matrix that `shard_map` cuts.
            is_small = min(shape) == 2 and max(shape) >= 16
            is_small |= math.prod(shape) in self._widths
            if is_small and not is_kernel and not names.is_low_rank(path):
                return self._asked(leaf)
            why = "outputs first" if leaf.is_turned else "inputs, outputs"
            # The number of a layer says nothing, and a gain over two axes may be one.
            is_sure = is_kernel and (has_bias or bool(module and not module.isdigit()))
            numbers = leaf.numbers((-2,), (-1,))
            # Biases show which way round weights are, those of others, too.
            hides = own[-1:] == ("weight",) or (has_bias and not bias)
            if hides and not self._is_whole:
                numbers = EitherWay(*numbers)
            return Verdict("matrix", numbers, why + "?" * (not is_sure))
        if not self._is_whole and own[-1:] == ("weight",):
            return self._asked(leaf)

        # Kernels of attention, of pairs, of experts: their shapes together decide.
        role, letters = self._layouts.get(path, ("", []))
        has_heads = role in WITH_HEADS
        # Norms, which the mask hides, would show a stack.
        hides = has_heads and rank > 3 and not self._is_whole
        if len(letters) == 1 and ("L" in letters[0] or not hides):
            inputs, outputs = sides_of(letters[0])
            outputs = outputs[-1:] if per_head and has_heads else outputs
            why = "attention" if has_heads or role == "out" else "shapes together"
            return Verdict("matrix", leaf.numbers(inputs, outputs), why)
        if letters or hides:
            return self._asked(leaf)
        for place, (features, experts) in self._routers.values():
            is_inside = path[: len(place)] == place and not leaf.is_turned
            if is_inside and shape[-3] == experts and features in shape[-2:]:
                # HuggingFace keeps outputs first in some models: what is called down
                # gives features, and what is called up or gate takes them.
                said = {*names.words(own[-1]), *names.words(module)}
                is_told = said & {"up", "gate", "down"} and shape[-2] != shape[-1]
                is_turned = is_told and (shape[-1] == features) != ("down" in said)
                sides = ((-1,), (-2,)) if is_turned else ((-2,), (-1,))
                return Verdict("matrix", leaf.numbers(*sides), "experts of a router")
        if not is_kernel:
            return self._asked(leaf)

        # Windows: one with one input for each output, depthwise, is no matrix.
        inner, window = shape[-2], shape[:-2]
        if leaf.is_turned:  # its outputs were in front, then its inputs
            inner, window = shape[0], shape[1:-1]
            if max(window) > _PATCH and not bias:  # or in front, as Flax has its window
                return self._asked(leaf)
        is_window = is_conv or without_ones(bias) == shape[-1:]
        is_window |= len(window) > 1 and len(set(window)) == 1
        if inner == 1 and is_window and set(window) != {1}:
            return adamw("depthwise convolution?")
        if is_row and set(window) != {1}:  # Keras' depthwise: one for each input
            return adamw("one output")

        # A bias has one entry per output, which separates input axes from output axes.
        bias = without_ones(bias)
        fitting = [
            leaf.numbers(range(len(bias) - n - rank, -n), range(-n, 0))
            for n in range(1, len(bias) + 1)
            if len(bias) < rank and bias == shape[: len(bias) - n] + shape[-n:]
        ]
        # Both ends may be the outputs: NetKet keeps them in front. Conv does not.
        is_either = bias == shape[: len(bias)] and not is_conv and not leaf.is_turned
        if len(fitting) == 1 and not is_either:
            return Verdict("matrix", fitting[0], "bias shape")
        if bias:
            return self._asked(leaf)
        # A hidden bias would distinguish scanned convolutions from those of more axes.
        is_told = rank < 4 or (rank == 4 and shape[0] == shape[1])
        if is_conv and (is_told or self._is_whole or not has_bias):
            return Verdict(
                "matrix", leaf.numbers(range(-rank, -1), (-1,)), "convolution"
            )
        if set(shape[:-2]) == {1}:
            return Verdict("matrix", leaf.numbers((-2,), (-1,)), "one layer")
        return self._asked(leaf)

    def _asked(self, leaf: Leaf) -> Verdict:
        """A guess to be checked by the user."""
        rank, shape, name = len(leaf.shape), leaf.shape, leaf.module
        inputs, outputs = tuple(range(-rank, -1)), (-1,)
        is_square = rank > 3 and len(set(shape[:-2])) == 1
        if rank == 3 and name in WITH_HEADS:
            inputs, outputs = (-3,), (-2, -1)
        elif rank > 2 and leaf.is_turned:
            # What PyTorch calls a weight is a window, or a stack of kernels.
            if max(shape[1:-1]) > _PATCH:
                inputs, outputs = (-3,), (-2,)
        elif not (rank == 3 and name == "out") and not is_square:
            inputs = (-2,)
        return Verdict("matrix", leaf.numbers(inputs, outputs), OPEN, is_known=False)


def adamw(why: str, label: str = "vector") -> Verdict:
    """The verdict on a leaf that holds no matrix."""
    return Verdict(label, None, why)

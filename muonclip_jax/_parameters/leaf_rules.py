"""What each leaf is, by its name, its shape and what lies beside it."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from optax.contrib import MuonDimensionNumbers

from . import names
from .attention_shapes import AttentionShapes, OpenHeads, PROJECTIONS, Sides
from .output_heads import find_heads
from .paths import Path
from .shapes_together import gemma_sides, low_rank_sides
from .spelled import Spelled
from .stack_axes import Shape, without_ones


_GENERAL = ("dense", "linear", "mlp", "ffn")
_DENSE = (*_GENERAL, "expert", "moe")
_STACKS = {"layers", "blocks", "stack", "stacked", "experts", "ensemble"}
_UNSURE = {"gate", "router"}
_WINDOW = 8  # of a convolution over time, at most
_PATCH = 16  # of any convolution, at most


class EitherWay(MuonDimensionNumbers):
    """Which side is the input is not known: a mask hides the bias that would tell."""


class Verdict(NamedTuple):
    """What a leaf is: its dimension numbers, `None` for AdamW, and what says so."""

    numbers: MuonDimensionNumbers | None
    why: str
    is_sure: bool = True
    is_head: bool = False  # whether it writes the output


class Ambiguous(Exception):
    """Names and shapes leave the axes of a leaf open; `guess` is what they may be."""

    def __init__(self, guess: MuonDimensionNumbers):
        self.guess = guess


class LeafRules:
    """The rules, in the order in which they are asked."""

    def __init__(
        self,
        leaves: Mapping[Path, Spelled],
        *,
        per_head: bool = False,
        is_whole: bool = True,
    ):
        self._leaves = leaves
        self._per_head, self._is_whole = per_head, is_whole
        self._shapes = {leaf.path: leaf.shape for leaf in leaves.values()}
        self._attention = AttentionShapes(self._shapes, self._shape_of)
        self._rules = (
            self._of_vector,
            self._of_table,
            self._of_head,
            self._of_rank_two,
            self._of_shapes_together,
            self._of_attention,
            self._of_window,
            self._of_bias,
            self._of_name,
        )

    def verdict(self, own: Path) -> Verdict:
        """Says what the leaf at a path is.

        **Raises:** `Ambiguous`.
        """
        leaf = self._leaves[own]
        if not self._is_whole and own[-1:] == ("weight",) and len(leaf.shape) > 2:
            raise Ambiguous(self._guess(leaf))
        for rule in self._rules:
            found = rule(own, leaf)
            if found is not None:
                return found
        raise Ambiguous(self._guess(leaf))

    def _of_vector(self, own: Path, leaf: Spelled) -> Verdict | None:
        if len(leaf.shape) < 2:
            return Verdict(None, "vector")
        if 0 in leaf.shape:
            return Verdict(None, "empty")
        if names.is_bias(own) or names.is_bias(leaf.path):
            return Verdict(None, "bias")
        is_norm = names.is_norm(leaf.path) or names.is_gain(own)
        # A shift of the same shape makes a gain of it, whatever its name.
        is_norm |= names.is_kernel(leaf.path) and leaf.shape == self._bias(leaf)
        return Verdict(None, "norm") if is_norm else None

    def _of_table(self, own: Path, leaf: Spelled) -> Verdict | None:
        is_kernel = leaf.path[-1:] == ("kernel",)
        is_layer = is_kernel and self._has_bias(leaf)
        if names.is_embedding(own) and not is_layer:
            return Verdict(None, "embedding")
        if own and names.words(own[-1])[-1:] == ("log",):
            return Verdict(None, "logarithms")
        # Of two axes it may be the block of a matrix that `shard_map` cuts.
        is_row = len(leaf.shape) > 2 and sum(size != 1 for size in leaf.shape) == 1
        if is_row and not is_kernel:
            return Verdict(None, "vector")
        if names.is_position_or_token(own) and not is_layer:
            return Verdict(None, "positions or tokens")
        return None

    def _of_head(self, own: Path, leaf: Spelled) -> Verdict | None:
        why = self._heads.get(leaf.path)
        own_name = () if names.is_kernel(leaf.path) else leaf.path[-1:]
        if why is None and any(map(names.is_head, (*leaf.path[-2:-1], *own_name))):
            why = "named so"
        if why is None:
            return None
        is_sure = why == "named so"
        return Verdict(None, f"output head: {why}", is_sure, is_head=True)

    def _of_rank_two(self, own: Path, leaf: Spelled) -> Verdict | None:
        if len(leaf.shape) != 2:
            return None
        if names.has_word(leaf.path[-2:-1], "conv") and min(leaf.shape) <= _WINDOW:
            return Verdict(None, "depthwise convolution", is_sure=False)
        why = "outputs first" if leaf.is_turned else "inputs, outputs"
        module = "".join(leaf.path[-2:-1])
        # The number of a layer says nothing, and a gain over two axes may be one, too.
        is_named = module not in _UNSURE and not module.isdigit() and bool(module)
        is_sure = leaf.path[-1:] == ("kernel",) and (is_named or self._has_bias(leaf))
        found = leaf.numbers((-2,), (-1,))
        # Biases tell which way round weights are, those of others, too.
        is_told = self._is_whole or not (
            own[-1:] == ("weight",) or self._hides_bias(leaf)
        )
        return Verdict(found if is_told else EitherWay(*found), why, is_sure)

    def _of_shapes_together(self, own: Path, leaf: Spelled) -> Verdict | None:
        sides = low_rank_sides(leaf.path, self._shape_of)
        if sides:
            return self._matrix(leaf, sides, "low-rank pair")
        sides = gemma_sides(leaf.path, self._shape_of)
        return self._matrix(leaf, sides, "einsum of attention") if sides else None

    def _of_attention(self, own: Path, leaf: Spelled) -> Verdict | None:
        if leaf.path[-1:] != ("kernel",) or len(leaf.path) < 2:
            return None
        module, name = leaf.path[:-2], leaf.path[-2]
        may_be_stack = name in PROJECTIONS and len(leaf.shape) > 3
        is_told = self._is_whole or self._shape_of((*module, "out", "kernel"))
        if may_be_stack and not is_told:  # where, norms would show
            raise Ambiguous(self._guess(leaf))
        try:
            sides = self._attention.sides(module, name, leaf.shape)
        except OpenHeads:
            raise Ambiguous(self._guess(leaf)) from None
        if sides and self._per_head and name in PROJECTIONS:
            sides = sides[0], sides[1][-1:]
        return self._matrix(leaf, sides, "attention") if sides else None

    def _of_window(self, own: Path, leaf: Spelled) -> Verdict | None:
        """A window with one input for each output, as depthwise, is no matrix."""
        shape = leaf.shape
        if leaf.path[-1:] != ("kernel",) or len(shape) < 3 or leaf.is_open:
            return None
        inputs, window = shape[-2], shape[:-2]
        if leaf.is_turned:  # its outputs were in front, then its inputs
            inputs, window = shape[0], shape[1:-1]
        is_window = (
            names.has_word(leaf.path[-2:-1], "conv")
            or without_ones(self._bias(leaf)) == shape[-1:]
            or (len(window) > 1 and len(set(window)) == 1)
        )
        if inputs != 1 or not is_window or set(window) == {1}:
            return None
        return Verdict(None, "depthwise convolution", is_sure=False)

    def _of_bias(self, own: Path, leaf: Spelled) -> Verdict | None:
        """A bias has one entry per output, which tells input axes from output axes."""
        if leaf.path[-1:] != ("kernel",):
            return None
        kernel = leaf.shape
        bias = self._bias(leaf)
        if own[-1:] == ("weight",):
            bias = without_ones(bias)
        for outputs in range(1, len(bias) + 1):
            stack = len(bias) - outputs
            inputs = len(kernel) - stack - outputs
            if inputs >= 1 and bias == kernel[:stack] + kernel[-outputs:]:
                reduction = tuple(range(-outputs - inputs, -outputs))
                output = tuple(range(-outputs, 0))
                return self._matrix(leaf, (reduction, output), "bias tells")
        if bias:
            raise Ambiguous(self._guess(leaf))
        return None

    def _of_name(self, own: Path, leaf: Spelled) -> Verdict | None:
        if leaf.path[-1:] != ("kernel",) or leaf.is_open:
            return None
        rank, module = len(leaf.shape), leaf.path[:-1]
        if not module and rank != 3:
            return None
        last = tuple(name for name in module if not name.isdigit())[-1:]
        # A hidden bias could have told scanned convolutions from those of more axes.
        is_square = rank == 4 and leaf.shape[0] == leaf.shape[1]
        told = rank < 4 or is_square or not self._hides_bias(leaf)
        if names.has_word(last, "conv") and told:
            inputs = tuple(range(-rank, -1))
            return self._matrix(leaf, (inputs, (-1,)), "convolution")
        if names.has_word(last, "densegeneral", "lineargeneral", "einsum"):
            return None
        why = self._stacked(own, leaf)
        is_sure = why != "stack, by rank"
        return self._matrix(leaf, ((-2,), (-1,)), why, is_sure) if why else None

    def _stacked(self, own: Path, leaf: Spelled) -> str:
        """What says that all but the last two axes are a stack, if anything does."""
        module, stack = leaf.path[:-1], leaf.shape[:-2]
        if set(stack) == {1}:
            return "one layer"
        if not module:
            return "stack, by rank"
        beside = self._kernels_below[module[:-1]]
        turned = (*stack, *leaf.shape[:-3:-1])
        is_other = self._is_whole or turned != leaf.shape
        if turned in beside and len(beside) > 1 and is_other:
            return "stack, as beside"
        if not self._is_whole:  # norms may show the stack elsewhere, a bias none
            return ""
        for depth, name in enumerate(module, start=1):
            # A query here was found to have no heads.
            is_own = depth == len(module) and name in PROJECTIONS
            if is_own or names.has_word((name,), *_DENSE) or name in _STACKS:
                below = {x for x in self._kernels_below[module[:depth]] if len(x) > 2}
                is_container = any(inner.isdigit() for inner in module[depth:])
                # DenseGeneral has such kernels, too, but not all with one first axis.
                is_told = len(below) > 1 or not names.has_word((name,), *_GENERAL)
                if is_told and not is_container and {x[0] for x in below} == {stack[0]}:
                    return "stack, by name"
        first = {x[0] for x in beside if len(x) > 2}
        # Flax's Dense has two axes; what else has three is known by name or shape.
        # In a stack those beside it would have three, too.
        is_plain = own[-1:] == ("kernel",) and {len(x) for x in beside} == {3}
        is_plain = is_plain and 1 not in leaf.shape[-2:]
        return "stack, by rank" if is_plain and first == {stack[0]} else ""

    def _matrix(
        self, leaf: Spelled, sides: Sides, why: str, is_sure: bool = True
    ) -> Verdict:
        return Verdict(leaf.numbers(*sides), why, is_sure)

    def _guess(self, leaf: Spelled) -> MuonDimensionNumbers:
        name = leaf.path[-2] if len(leaf.path) > 1 else ""
        if len(leaf.shape) == 3 and name in PROJECTIONS:
            return leaf.numbers((-3,), (-2, -1))
        if name == "out" and len(leaf.shape) == 3:
            return leaf.numbers((-3, -2), (-1,))
        inputs = tuple(range(-len(leaf.shape), -1))
        if leaf.is_open and max(leaf.shape[2:]) <= _PATCH:  # as PyTorch has it
            return leaf.numbers([axis + 1 for axis in inputs], inputs[:1])
        if len(leaf.shape) > 3 and len(set(leaf.shape[:-2])) == 1:
            return leaf.numbers(inputs, (-1,))
        return leaf.numbers((-2,), (-1,))

    def _bias(self, leaf: Spelled) -> Shape:
        return self._shape_of((*leaf.path[:-1], "bias"))

    def _has_bias(self, leaf: Spelled) -> bool:
        return (*leaf.path[:-1], "bias") in self._shapes

    def _hides_bias(self, leaf: Spelled) -> bool:
        """Whether a mask hides the bias, which could have told."""
        return self._has_bias(leaf) and not self._bias(leaf)

    def _shape_of(self, path: Path) -> Shape:
        return self._shapes.get(path, ())

    @functools.cached_property
    def _heads(self) -> dict[Path, str]:
        return find_heads(self._leaves, is_whole=self._is_whole)

    @functools.cached_property
    def _kernels_below(self) -> dict[Path, set[Shape]]:
        below: dict[Path, set[Shape]] = {}
        for path, shape in self._shapes.items():
            for depth in range(len(path)) if path[-1:] == ("kernel",) else ():
                below.setdefault(path[:depth], set()).add(shape)
        return below

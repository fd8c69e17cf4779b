"""Every leaf read by its name, its shape and what is next to it: a matrix or not.

Leaves are first written as Flax would have them, one layer of each stack: Haiku calls a
kernel `w`, Equinox and Haliax `weight` and keep it as `(out, in)`, others call the
projections of attention `q_proj` or `wq`. Read like this, one list of rules serves them
all. A leaf that no rule decides is open, and the caller asks.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from . import names
from .paths import is_masked, Path, PathedTree
from .stacks import IN_FRONT, ModuleStacks, Shape, StackAxes, without_ones


_WINDOW = 8  # of a convolution over time, at most
_PATCH = 16  # of any convolution, at most
_COLORS = 4  # at most, with transparency


class EitherWay(MuonDimensionNumbers):
    """Which side is the input is not known: a mask hides the bias that would tell."""


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
    is_turned: bool = False  # the leaf has its outputs first
    is_open: bool = False  # nothing tells which of its axes are outputs
    is_stacked: bool = False

    def numbers(self, inputs: Iterable[int], outputs: Iterable[int]):
        """Dimension numbers of the leaf, from axes of the shape."""
        sides = (tuple(self.axes[i] for i in axes) for axes in (inputs, outputs))
        return MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in sides))


def is_turned_by_bias(shape: Shape, bias: Shape) -> bool | None:
    """Whether outputs come first, as a bias says, which has just those."""
    if 1 < len(bias) == len(shape) - 1 and bias == (shape[0], *(1,) * (len(bias) - 1)):
        return True  # PyTorch's convolution, of as many inputs as outputs, too
    bias = without_ones(bias)
    if not bias or len(bias) >= len(shape):
        return None
    first, last = shape[: len(bias)] == bias, shape[-len(bias) :] == bias
    return first if first != last else None


def _write(layers: Mapping[Path, Shape]) -> dict[Path, Path]:
    """The path of every leaf in Flax's words."""
    written: dict[Path, Path] = {}
    for path, shape in layers.items():
        # penzai writes `query.weights`, a checkpoint of PyTorch the whole path.
        *module, last = (*path[:-1], *path[-1].split(".")) if path else ("",)
        beside = path[:-1]
        stem, _, end = last.rpartition("_")
        plain = last
        if last == "b" and (*beside, "w") in layers:
            plain = "bias"
        elif last in ("w", "weight", "weights") and (
            module or (last == "weight" and ("bias",) in layers)
        ):
            # A weight with more axes than its bias is a layer, whatever its name.
            bias = layers.get((*beside, "bias" if last == "weight" else "b"), ())
            is_norm = names.kind(path) == "norm" and not 0 < len(bias) < len(shape)
            plain = "scale" if is_norm else "kernel"
        elif end == "w" and (
            (*beside, f"{stem}_b") in layers or names.projection(stem)
        ):
            module, plain = [*module, stem], "kernel"  # AlphaFold
        elif end == "b" and (*beside, f"{stem}_w") in layers:
            module, plain = [*module, stem], "bias"
        elif (
            stem in ("kernel", "bias")
            and {
                (*beside, f"kernel_{end}"),
                (*beside, f"bias_{end}"),
            }
            <= layers.keys()
        ):
            module, plain = [*module, end], stem  # Dopamine's noisy layers
        elif last in ("0", "1") and (*beside, "2") not in layers:
            # A pair of arrays whose second is a bias: stax, and lists written by hand.
            kernel, bias = (layers.get((*beside, i), ()) for i in "01")
            if len(kernel) > 1 and without_ones(bias) in (kernel[-1:], kernel[:1]):
                plain = "kernel" if last == "0" else "bias"
        written[path] = (*module, plain) if path else path
    children: dict[Path, dict[str, str]] = {}
    for path in written.values():
        for depth in range(len(path)):
            role = names.projection(path[depth]) or ""
            children.setdefault(path[:depth], {})[path[depth]] = role
    for module, below in children.items():
        if {"query", "key"} <= set(below.values()) and "out" not in below.values():
            others = [name for name in below if name in names.OUT_IN_ATTENTION]
            below |= dict.fromkeys(others[:1], "out")
    for own, path in written.items():
        for depth in range(max(len(path) - 2, 0), len(path)):
            below, rest = children[path[:depth]], path[depth + 1 :]
            roles, role = list(below.values()), below[path[depth]]
            # No second module may be called the same; a bare array needs an output.
            is_alone = {"query", "key"} <= set(roles) and roles.count(role) == 1
            if role and is_alone and (rest or "out" in roles):
                written[own] = (*path[:depth], role, *(rest or ("kernel",)))
                break
    return written


class Reading:
    """The leaves of a tree in Flax's words, and what each is."""

    def __init__(self, tree: PathedTree, stack_axes: StackAxes = IN_FRONT):
        self.tree, self.leaf_at = tree, tree.by_path()
        self.stacks = ModuleStacks(stack_axes, self.leaf_at, tree.axis_names)
        layers = {path: self.stacks.layer(path) for path in self.leaf_at}
        written = _write(layers)
        biases = {
            path[:-1]: layers[own]
            for own, path in written.items()
            if names.kind(path) == "bias"
        }
        weights = [
            (layers[own], biases.get(path[:-1], ()))
            for own, path in written.items()
            if "weight" in own[-2:] and path[-1:] == ("kernel",)
        ]
        votes = [is_turned_by_bias(*x) for x in weights]
        told = [vote for vote in votes if vote is not None]
        # What is called a weight has its outputs first in Equinox and Haliax.
        weights_turned = sum(told) * 2 >= len(told)
        self.leaves: dict[Path, Leaf] = {}
        for own, path in written.items():
            shape, stack = layers[own], self.stacks.of(own)
            rank = len(self.stacks.shape(own))
            axes = tuple(i - rank for i in stack.layer(tuple(range(rank))))
            is_kernel, is_weight = path[-1:] == ("kernel",), "weight" in own[-2:]
            bias, module = biases.get(path[:-1], ()), "".join(path[-2:-1])
            is_open = (
                is_kernel
                and is_weight
                and len(shape) > 2
                and not bias
                and module not in names.WITH_HEADS | {"out"}
                and not names.has_word(module, "conv")
            )
            # Kernels of rank 2 may be turned, too: HuggingFace's GPT-2, and those of
            # recurrent cells in Equinox.
            is_cell = own[-1:] != () and own[-1].startswith(("weight_", "w_"))
            may_turn = is_weight or own[-1:] == ("0",)
            may_turn |= len(shape) == 2 and (is_kernel or is_cell)
            by = 0
            if len(shape) > 1 and may_turn and len(without_ones(bias)) < len(shape):
                vote = is_turned_by_bias(shape, bias)
                if vote:
                    by = len(without_ones(bias))
                elif vote is None and is_kernel and is_weight and not is_open:
                    turns = weights_turned and names.kind(own) != "embedding"
                    has_heads = module in ("query", "key", "value")
                    by = turns * (len(shape) - 1 if has_heads else 1)
            shape, axes = shape[by:] + shape[:by], axes[by:] + axes[:by]
            self.leaves[own] = Leaf(
                own, path, shape, axes, bool(by), is_open, stack.depth > 0
            )
        self.shapes = {leaf.path: leaf.shape for leaf in self.leaves.values()}
        # A mask of matrices hides vectors, and heads next to them.
        hidden = [path for path, x in self.leaf_at.items() if is_masked(x)]
        self.is_whole = not any(names.kind(path) in ("bias", "norm") for path in hidden)

    @functools.cached_property
    def layouts(self) -> dict[Path, tuple[str, list[str]]]:
        """The role of every kernel that a layout may name, and the letters that fit it.

        Several if layouts fit that take the kernel apart differently; none if none fits.
        """
        known = {role for layout in names.LAYOUTS for role in layout}
        modules: dict[tuple[Path, str], dict[str, Path]] = {}
        for leaf in self.leaves.values():
            at = len(leaf.path) - 1 - (leaf.path[-1:] == ("kernel",))
            name, suffix = "".join(leaf.path[at : at + 1]), ""
            if name[-2:-1] == "_" and name[:-2] in known:
                name, suffix = name[:-2], name[-2:]  # pi0's second expert
            elif name[-7:] in ("_lora_a", "_lora_b"):
                name, suffix = name[-6:], name[:-6]  # qwix
            if name in known and leaf.shape:
                modules.setdefault((leaf.path[:at], suffix), {})[name] = leaf.path
        found: dict[Path, tuple[str, list[str]]] = {}
        for members in modules.values():
            shapes = {role: self.shapes[path] for role, path in members.items()}
            if max(map(len, shapes.values())) < 3:
                continue
            fitting = []
            for layout in names.LAYOUTS if len(shapes) < 9 else ():
                if not shapes.keys() <= layout.keys():
                    continue
                pairs = [(layout[role], shape) for role, shape in shapes.items()]
                for role, path in members.items():
                    # A bias has the outputs of its kernel, and its layers.
                    beside = (*path[:-1], "bias") if path[-1] == "kernel" else ()
                    bias, letters = self.shapes.get(beside), layout[role]
                    inputs, _ = _sides(role, letters)
                    left = (
                        x
                        for i, x in enumerate(letters)
                        if i - len(letters) not in inputs
                    )
                    pairs += [("".join(left), bias)] if bias else []
                sizes: dict[str, int] = {}
                fits = all(
                    len(letters) == len(shape) for letters, shape in pairs
                ) and all(
                    sizes.setdefault(x, int(x) if x.isdigit() else size) == size
                    for letters, shape in pairs
                    for x, size in zip(letters, shape, strict=True)
                )
                for whole, *parts in ("MNV", "NKG"):
                    known_sizes = [sizes.get(x) for x in (whole, *parts)]
                    product, *factors = known_sizes
                    fits &= None in known_sizes or product == math.prod(factors)
                fits &= sizes.get("N", 0) % max(1, sizes.get("K", 1)) == 0
                fitting += [(layout, sizes)] if fits else []
            # Features as many as heads hold would be a coincidence in a stack; and in
            # Flax a query alone has heads.
            likely = [
                (layout, sizes)
                for layout, sizes in fitting
                if not any("L" in letters for letters in layout.values())
                if sizes.get("D") == sizes.get("N", 0) * sizes.get("H", 0)
                or ("value" not in shapes and sizes.get("D", 0) >= sizes.get("N", 0))
            ]
            for role, path in members.items():
                letters = [layout[role] for layout, _ in likely or fitting]
                found[path] = role, list({_sides(role, x): x for x in letters}.values())
        return found

    def has_heads(self, module: Path) -> bool | None:
        """Whether the projections of a module have an axis of heads; `None` if open."""
        kernels = [
            (*module, role, "kernel") for role in ("query", "wq_b", "key", "value")
        ]
        path = next((path for path in kernels if self.shapes.get(path)), None)
        if path is None or len(self.shapes[path]) < 3:
            return False
        _, letters = self.layouts.get(path, ("", []))
        return bool({"N", "K"} & set(letters[0])) if len(letters) == 1 else None

    @functools.cached_property
    def _routers(self) -> dict[Path, tuple[Path, Shape]]:
        """By the path of each router: where its experts are, and its shape."""
        found = {}
        # How many experts are below each module; 0 for such as have a number each.
        experts: dict[Path, set[int]] = {}
        for path, shape in self.shapes.items():
            for depth, name in enumerate(path):
                if name == "experts" or len(shape) > 2:
                    count = shape[-3] if len(shape) > 2 else 0
                    experts.setdefault(path[:depth], set()).add(count)
        for leaf in self.leaves.values():
            at = len(leaf.path) - 1 - (leaf.path[-1:] == ("kernel",))
            last = names.words("".join(leaf.path[at : at + 1]))[-1:]
            is_gate = last == ("gate",) and not experts.get(
                leaf.path[:at], set()
            ).isdisjoint({0, *leaf.shape})
            if len(leaf.shape) == 2 and (last == ("router",) or is_gate):
                found[leaf.own] = leaf.path[:at], leaf.shape
        return found

    def verdicts(self, per_head: bool = False) -> dict[Path, Verdict]:
        """What every leaf in sight is, by its own path."""
        found = {}
        for leaf in self.leaves.values():
            array = self.leaf_at[leaf.own]
            if is_masked(array):
                found[leaf.own] = Verdict(None, "hidden")
            elif not jnp.issubdtype(array.dtype, jnp.inexact):
                found[leaf.own] = Verdict(None, "no floats")
            else:
                found[leaf.own] = self._verdict(leaf, per_head)
        if self.is_whole:
            found |= self._unnamed_heads(found)
        for own, verdict in found.items():
            stack, shape = self.stacks.of(own), self.stacks.shape(own)
            if stack.depth and verdict.numbers is not None and not verdict.is_open:
                sizes = " x ".join(map(str, stack.sizes(shape)))
                why = f"{verdict.why}; stack of {sizes} at axis {stack.start}"
                found[own] = verdict._replace(why=why)
        return found

    def _verdict(self, leaf: Leaf, per_head: bool) -> Verdict:
        """The rules on one leaf, in their order; heads without a name come after."""
        own, path, shape, rank = leaf.own, leaf.path, leaf.shape, len(leaf.shape)
        is_kernel, module = path[-1:] == ("kernel",), "".join(path[-2:-1])
        bias = self.shapes.get((*path[:-1], "bias"), ())
        has_bias = (*path[:-1], "bias") in self.shapes
        kinds = names.kind(own), names.kind(path)
        axis_names = self.tree.axis_names.get(own, ())

        # Vectors, whatever the rank: what is added or multiplied.
        if rank < 2:
            return Verdict(None, "vector")
        if 0 in shape:
            return Verdict(None, "empty")
        if "bias" in kinds:
            return Verdict(None, "bias")
        # A shift of the same shape makes a gain of it, whatever its name.
        is_gain = path[-1:] and path[-1] in names.KERNELS and shape == bias
        if kinds[1] == "norm" or kinds[0] == "gain" or is_gain:
            return Verdict(None, "norm")

        # Tables: what is looked up. With a bias it is a layer, such as patches.
        kind = kinds[0] or (kinds[1] if "." in "".join(own[-1:]) else "")
        is_layer = is_kernel and has_bias
        if kind == "logarithms" or (kind in _TABLES and not is_layer):
            return Verdict(
                None, kind, label="embedding" if kind == "embedding" else "vector"
            )
        # Of two axes it may be the block of a matrix that `shard_map` cuts.
        if rank > 2 and sum(size != 1 for size in shape) == 1 and not is_kernel:
            return Verdict(None, "vector")
        if "vocab" in axis_names:
            is_table = axis_names.index("vocab") - len(axis_names) == leaf.axes[0]
            why, label = (
                ("embedding",) * 2 if is_table else ("output head: axis", "head")
            )
            return Verdict(None, why, label=label)
        own_name = () if path[-1:] and path[-1] in names.KERNELS else path[-1:]
        if any(map(names.is_head, (module, *own_name))):
            return Verdict(None, "output head: named so", label="head")
        if own in self._routers:
            return Verdict(None, "router", label="router")

        inputs, outputs = tuple(range(-rank, -1)), (-1,)
        if not self.is_whole and own[-1:] == ("weight",) and rank > 2:
            return self._open(leaf)
        if rank == 2:
            is_window = names.has_word(module, "conv") and min(shape) <= _WINDOW
            if is_window:  # RecurrentGemma: (window, channels)
                return Verdict(None, "depthwise convolution", is_sure=False)
            why = "outputs first" if leaf.is_turned else "inputs, outputs"
            # The number of a layer says nothing, and a gain over two axes may be one.
            is_sure = is_kernel and (has_bias or bool(module and not module.isdigit()))
            numbers = leaf.numbers((-2,), (-1,))
            # Biases tell which way round weights are, those of others, too.
            # Under a name that says nothing, two gains for each of many features, or
            # many for two, are as likely: FermiNet's `sigma`, a pooling query.
            is_factor = names.low_rank_partner(path) is not None
            if (
                not is_kernel
                and not is_factor
                and 8 * min(shape) <= max(shape)
                and min(shape) < 3
            ):
                return self._open(leaf)
            hides = own[-1:] == ("weight",) or (has_bias and not bias)
            if hides and not self.is_whole:
                numbers = EitherWay(*numbers)
            return Verdict(numbers, why, is_sure)

        # Kernels of attention, of pairs, of experts: their shapes together tell.
        role, letters = self.layouts.get(path, ("", []))
        has_heads = role in names.WITH_HEADS
        # Norms, which the mask hides, would show a stack.
        hides = (
            has_heads and rank > 3 and not self.is_whole and "L" not in "".join(letters)
        )
        if len(letters) == 1 and not hides:
            sides = _sides(role, letters[0])
            sides = (sides[0], sides[1][-1:]) if per_head and has_heads else sides
            return Verdict(
                leaf.numbers(*sides),
                "attention" if has_heads or role == "out" else "pair",
            )
        if letters or hides:
            return self._open(leaf)
        for place, (features, experts) in self._routers.values():
            is_inside = path[: len(place)] == place
            if is_inside and shape[-3] == experts and features in shape[-2:]:
                return Verdict(leaf.numbers((-2,), (-1,)), "experts of a router")
        if not is_kernel:
            return self._open(leaf)

        # Windows: one with one input for each output, depthwise, is no matrix.
        is_conv = names.has_word(module, "conv")
        inner, window = shape[-2], shape[:-2]
        if leaf.is_turned:  # its outputs were in front, then its inputs
            inner, window = shape[0], shape[1:-1]
        is_window = is_conv or without_ones(bias) == shape[-1:]
        is_window |= len(window) > 1 and len(set(window)) == 1
        if inner == 1 and is_window and set(window) != {1} and not leaf.is_open:
            return Verdict(None, "depthwise convolution", is_sure=False)

        # A bias has one entry per output, which tells input axes from output axes.
        is_padded = own[-1:] == ("weight",) or len(bias) >= rank
        bias = without_ones(bias) if is_padded else bias
        for n in range(1, len(bias) + 1):
            stack = len(bias) - n
            if stack + n < rank and bias == shape[:stack] + shape[-n:]:
                sides = tuple(range(stack - rank, -n)), tuple(range(-n, 0))
                return Verdict(leaf.numbers(*sides), "bias tells")
        if bias or leaf.is_open:
            return self._open(leaf)
        # A hidden bias could have told scanned convolutions from those of more axes.
        is_told = rank < 4 or (rank == 4 and shape[0] == shape[1])
        if is_conv and (is_told or self.is_whole or not has_bias):
            return Verdict(leaf.numbers(inputs, outputs), "convolution")
        if set(shape[:-2]) == {1}:
            return Verdict(leaf.numbers((-2,), (-1,)), "one layer")
        if "experts" in path[:-1] and self.is_whole:
            return Verdict(leaf.numbers((-2,), (-1,)), "experts, by name")
        return self._open(leaf)

    def _open(self, leaf: Leaf) -> Verdict:
        """What a leaf may be, to be checked by the user."""
        rank, name = len(leaf.shape), "".join(leaf.path[-2:-1])
        inputs = tuple(range(-rank, -1))
        sides = (-2,), (-1,)
        if rank == 3 and name in names.WITH_HEADS:
            sides = (-3,), (-2, -1)
        elif rank == 3 and name == "out":
            sides = (-3, -2), (-1,)
        elif leaf.is_open and max(leaf.shape[2:]) <= _PATCH:  # as PyTorch has it
            sides = tuple(i + 1 for i in inputs), inputs[:1]
        elif rank > 3 and len(set(leaf.shape[:-2])) == 1:
            sides = inputs, (-1,)
        return Verdict(leaf.numbers(*sides), "open", is_open=True)

    def _unnamed_heads(self, verdicts: Mapping[Path, Verdict]) -> dict[Path, Verdict]:
        """The kernels that write the output though they are not called a head.

        They have the size of the vocabulary, or nothing takes what they give: their
        outputs are the input of no other leaf. Layers of repeated blocks are none.
        """
        kernels: dict[Path, Leaf] = {}
        taken, hidden, tables = set(), set(), []
        matrices, has_convolution, inside = 0, False, {}
        for own, verdict in verdicts.items():
            leaf, shape = self.leaves[own], self.leaves[own].shape
            for depth in range(1, len(leaf.path)):
                if leaf.path[depth - 1][-1:].isdigit():
                    inside.setdefault(leaf.path[:depth], set()).add(
                        (leaf.path[depth:], shape)
                    )
            if verdict.why == "embedding" and len(shape) == 2:
                tables += [] if names.says_position(own) else [leaf]
            if verdict.why in ("embedding", "norm", "vector") and shape:
                is_norm = names.kind(leaf.path) in ("norm", "embedding")
                taken |= {shape[-1]} if is_norm or verdict.why == "embedding" else set()
            if verdict.numbers is None and verdict.label != "head":
                continue
            matrices += 1
            has_convolution |= len(shape) > 3
            if len(shape) == 2 and leaf.path[-1:] == ("kernel",) and len(leaf.path) > 1:
                hidden |= {shape[0]}
                if verdict.label != "head":
                    kernels[own] = leaf
            if verdict.numbers is None:
                taken |= {shape[0]}
                continue
            sides = verdict.numbers.reduction_axis
            sides = (sides,) if isinstance(sides, int) else sides
            full = self.stacks.shape(own)
            sizes = [full[i] for i in sides]
            is_window = (
                names.has_word("".join(leaf.path[-2:-1]), "conv") and len(sizes) > 1
            )
            if is_window:
                channels = sizes[0] if leaf.is_turned else sizes[-1]
                taken |= {channels} if channels > _COLORS else set()
            else:
                taken |= {math.prod(sizes)}
                taken |= set(sizes) if verdict.why != "attention" else set()
        taken -= {1}
        # Numbered modules that have a twin: the same leaves of the same shapes.
        twins: dict[object, list[Path]] = {}
        for module, entries in inside.items():
            alike = module[:-1], module[-1].rstrip("0123456789"), frozenset(entries)
            twins.setdefault(alike, []).append(module)
        blocks = {x for alike in twins.values() if len(alike) > 1 for x in alike}
        runs = _by(
            lambda x: (x.path[:-2], x.path[-2].rstrip("0123456789")), kernels.values()
        )
        last = {max(run, key=_in_order).own for run in runs.values() if len(run) > 1}
        is_last = {
            max(unnamed, key=_in_order).own
            for beside in _by(lambda x: x.path[:-2], kernels.values()).values()
            if (unnamed := [x for x in beside if names.UNNAMED.fullmatch(x.path[-2])])
        }
        in_block = {
            own
            for own, leaf in kernels.items()
            if leaf.is_stacked
            or any(leaf.path[:n] in blocks for n in range(len(leaf.path) - 1))
        }
        # With as many outputs as there are tokens: the last one next to the table, or
        # at the root, else those that no layer takes.
        of_vocabulary: list[Path] = []
        if not any(verdict.label == "head" for verdict in verdicts.values()):
            sizes = {x.shape[0] for x in tables if x.shape[0] != x.shape[1]} - hidden
            of_vocabulary = [
                own
                for own in is_last
                if any(
                    table.shape[::-1] == kernels[own].shape
                    and kernels[own].path[:-2] in ((), table.path[:-2])
                    for table in tables
                )
            ] or [
                x for x in kernels if x not in in_block and kernels[x].shape[1] in sizes
            ]
        found: dict[Path, Verdict] = {}
        for own, leaf in kernels.items():
            path, (features, outputs) = leaf.path, leaf.shape
            module, name, parent = path[:-1], path[-2], path[:-2]
            has_bias = (*module, "bias") in self.shapes
            is_in_block = own in in_block
            beside = [x.shape for x in kernels.values() if x.path[:-2] == parent]
            if own in of_vocabulary:
                found[own] = _head("as large as the vocabulary")
            elif outputs in taken or self.has_attention(parent):
                continue
            elif any(
                not {"lstm", "gru", "rnn"}.isdisjoint(names.words(x)[-1:])
                for x in path[:-1]
            ):
                continue
            elif names.takes_features(name) and own not in last:
                continue
            elif outputs == 1:
                found[own] = _head("nothing takes its outputs")
            elif has_bias and not is_in_block and matrices > 2 - has_convolution:
                # Fused projections and gates are taken apart.
                is_parts = outputs % features == 0 and len(path) > 2
                is_gated = any((2 * a, b) == (outputs, features) for a, b in beside)
                if not is_parts and not is_gated:
                    found[own] = _head("nothing takes its outputs")
        # Next to the whole model, one layer of any name often is the head, though as many
        # features are taken elsewhere: nothing tells.
        at_root = [x for x in kernels.values() if len(x.path) == 2]
        if len(at_root) == 1 < len(kernels) and not tables and not found:
            leaf = at_root[0]
            if leaf.own in is_last and not any(
                v.label == "head" for v in verdicts.values()
            ):
                found[leaf.own] = self._open(leaf)
        # What is called a head of one part may write the width of another: openpi.
        for own, verdict in verdicts.items():
            leaf = self.leaves[own]
            parent = leaf.path[:-2]
            if verdict.label == "head" and leaf.path[-2:-1] == ("head",) and parent[1:]:
                gains = {
                    x.shape[-1]
                    for x in self.leaves.values()
                    if verdicts[x.own].why in ("vector", "norm") and x.shape
                    if names.kind(x.path) == "norm" and x.path[: len(parent)] != parent
                }
                if leaf.shape[-1] in gains:
                    found[own] = self._open(leaf)
        return found

    def has_attention(self, module: Path) -> bool:
        return any(
            (*module, role, "kernel") in self.shapes
            for role in ("query", "key", "wkv_b")
        )


def _by(
    key: Callable[[Leaf], object], leaves: Iterable[Leaf]
) -> dict[object, list[Leaf]]:
    """Leaves by what they have in common."""
    found: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault(key(leaf), []).append(leaf)
    return found


_TABLES = ("embedding", "positions or tokens")


def _head(why: str) -> Verdict:
    return Verdict(None, f"output head: {why}", is_sure=False, label="head")


def _sides(role: str, letters: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Input and output axes of a kernel in a layout, from the end."""
    outputs = names.OUTPUTS.get(role)
    free = [
        i - len(letters) for i, x in enumerate(letters) if x != "L" and not x.isdigit()
    ]
    is_output = [
        letters[i] in outputs
        if outputs
        else letters[i] not in names.INPUTS.get(role, "DCRS")
        for i in free
    ]
    inner = tuple(i for i, out in zip(free, is_output, strict=True) if not out)
    return inner, tuple(i for i, out in zip(free, is_output, strict=True) if out)


def _in_order(leaf: Leaf) -> list[tuple[float, str]]:
    """`Dense_10` after `Dense_9`, `linear` before `linear_1`, `out` at the end."""
    numbers = [re.sub(r"\D", "", name) for name in leaf.path]
    ends = [math.inf if name in ("out", "output") else 0.0 for name in leaf.path]
    return [
        (float(number or end), name)
        for number, end, name in zip(numbers, ends, leaf.path, strict=True)
    ]

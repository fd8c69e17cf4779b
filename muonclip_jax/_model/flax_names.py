"""What the parameter names and shapes of stock Flax modules say about a leaf.

This is the one place that knows how Linen and NNX name things. Both spell a layer
`<module>/kernel` and `<module>/bias`, and attention
`<module>/{query,key,value,out}/{kernel,bias}`.
"""

import re
from collections.abc import Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from .paths import IN_FRONT, is_masked, Path, PathedTree, stack_axis_of, StackAxes


_VECTORS = frozenset({"bias", "scale", "mean", "var"})
_EMBEDDINGS = frozenset({"wte", "wpe"})
_HEADS = frozenset({"head", "logits", "unembed", "classifier", "vocab"})
_PROJECTIONS = ("query", "key", "value", "wq_b", "wkv_b")


class Ambiguous(Exception):
    """The names and the shape of a leaf leave its axes open."""


class FlaxTree:
    """A parameter tree that can be asked what each of its leaves is."""

    def __init__(
        self,
        tree: PathedTree,
        *,
        per_head: bool = False,
        stack_axes: StackAxes = IN_FRONT,
    ):
        self._per_head = per_head
        self._stack_axes = stack_axes
        self._leaves = tree.by_path()
        self._output_head = self._find_output_head()

    def dimension_numbers(self, path: Path) -> MuonDimensionNumbers | None:
        """Says which axes of a leaf form its matrices; `None` if it holds none."""
        numbers, stack = self._with_stack_first(path), self._stack_axis(path)
        if numbers is None or not stack:
            return numbers
        rank = len(self._shape(path))
        reduction, output = (
            _squeeze(tuple(_moved_back(axis, stack, rank) for axis in _tuple(axes)))
            for axes in numbers
        )
        return MuonDimensionNumbers(reduction, output)

    def _with_stack_first(self, path: Path) -> MuonDimensionNumbers | None:
        name, module = path[-1] if path else "", path[:-1]
        shape = self._shape(path)
        if len(shape) < 2 or name in _VECTORS or _is_embedding(path):
            return None
        if name == "kernel":
            if _tokens(path[-2:-1]) & _HEADS or path == self._output_head:
                return None
            return self._kernel(module, shape)
        if len(shape) == 2:
            return MuonDimensionNumbers(-2, -1)
        raise Ambiguous

    def attention_modules(self) -> list[Path]:
        """Returns the modules with a query and a key projection, in tree order."""
        modules = [p[:-2] for p in self._leaves if p[-2:] == ("query", "kernel")]
        return [m for m in modules if (*m, "key", "kernel") in self._leaves]

    def has_module(self, module: Path) -> bool:
        return any(path[: len(module)] == module for path in self._leaves)

    def has_leaf(self, path: Path) -> bool:
        return path in self._leaves

    def _kernel(self, module: Path, shape: tuple[int, ...]) -> MuonDimensionNumbers:
        if len(shape) == 2:
            return MuonDimensionNumbers(-2, -1)
        if self._is_stock_attention(module[:-1]):
            if module[-1] in _PROJECTIONS:
                return MuonDimensionNumbers(-3, -1 if self._per_head else (-2, -1))
            if module[-1] == "out":
                flat = len(shape) < len(self._projection_shape(module[:-1]))
                return MuonDimensionNumbers(-2 if flat else (-3, -2), -1)
        return self._split_by_bias(module) or self._split_by_name(module, shape)

    def _split_by_name(self, module: Path, shape: tuple[int, ...]):
        rank, last = len(shape), _tokens(module[-1:])
        # A hidden bias could have told scanned convolutions from those in 3D.
        told = rank < 5 or not self.has_leaf((*module, "bias"))
        if _starts(last, "conv") and told:
            return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)
        if _starts(last, "densegeneral", "lineargeneral", "einsum"):
            raise Ambiguous
        stack = rank == 3 or set(shape[:-2]) == {1}
        if stack or _starts(_tokens(module), "dense", "linear", "mlp", "expert", "moe"):
            return MuonDimensionNumbers(-2, -1)
        raise Ambiguous

    def _split_by_bias(self, module: Path) -> MuonDimensionNumbers | None:
        """A bias has one entry per output, which tells input axes from output axes."""
        bias = self._shape((*module, "bias"))
        if not bias:
            return None
        kernel = self._shape((*module, "kernel"))
        rank = len(kernel)
        for outputs in range(1, len(bias) + 1):
            stack = len(bias) - outputs
            inputs = rank - stack - outputs
            if inputs >= 1 and bias == kernel[:stack] + kernel[rank - outputs :]:
                reduction = tuple(range(-outputs - inputs, -outputs))
                return MuonDimensionNumbers(
                    _squeeze(reduction), _squeeze(tuple(range(-outputs, 0)))
                )
        raise Ambiguous

    def _is_stock_attention(self, module: Path) -> bool:
        """Tells `(features, heads, head_dim)` from a stack of plain Dense kernels."""
        query = self._projection_shape(module)
        value = self._shape((*module, "value", "kernel"))
        out = self._shape((*module, "out", "kernel"))
        bias = self._shape((*module, "query", "bias"))
        if len(query) < 3 or (bias and bias != query[:-3] + query[-2:]):
            return False
        if not out:
            return True
        if len(out) == len(query) - 1:  # an out that takes the heads side by side
            width = query[-2] * (value[-1] if value else 1)
            fits = out[-2] == width if value else out[-2] % width == 0
            return out[:-2] == query[:-3] and fits
        heads_match = len(out) == len(query) and out[-3] == query[-2]
        return heads_match and (not value or out[-2] == value[-1])

    def _projection_shape(self, module: Path) -> tuple[int, ...]:
        """The shape of the query; MaxText's name for it is that of query LoRA."""
        query = self._shape((*module, "query", "kernel"))
        return query or self._shape((*module, "wq_b", "kernel"))

    def _find_output_head(self) -> Path | None:
        """The last Dense beside an embedding, if its shape is the embedding's turned.

        A decoder that leaves its head unnamed (`Dense_7`) is known by this alone.
        """
        for path in self._leaves:
            if path[-1:] == ("embedding",):
                beside = [p for p in self._leaves if _is_unnamed_dense(p, path[:-2])]
                last = max(beside, key=_number, default=())
                if last and self._shape(last) == self._shape(path)[::-1] != ():
                    return last
        return None

    def _shape(self, path: Path) -> tuple[int, ...]:
        """The shape of a leaf, with the axis of stacked layers in front."""
        leaf: Any = self._leaves.get(path)
        shape = () if leaf is None or is_masked(leaf) else tuple(leaf.shape)
        axis = self._stack_axis(path)
        return shape[axis : axis + 1] + shape[:axis] + shape[axis + 1 :]

    def _stack_axis(self, path: Path) -> int:
        return stack_axis_of(path, self._stack_axes)


def _is_embedding(path: Path) -> bool:
    """Whether a leaf, or the module that holds it, is named as an embedding."""
    return any(
        "embed" in name.lower() or name.lower() in _EMBEDDINGS for name in path[-2:]
    )


def _tokens(names: Path) -> set[str]:
    return {token for name in names for token in re.split(r"[^a-z]+", name.lower())}


def _starts(tokens: set[str], *beginnings: str) -> bool:
    return any(token.startswith(beginnings) for token in tokens)


def _is_unnamed_dense(path: Path, parent: Path) -> bool:
    """Whether a leaf is the kernel of a `Dense_<number>`, or of an `out`, in parent."""
    return (
        path[:-2] == parent
        and path[-1:] == ("kernel",)
        and re.fullmatch(r"Dense_\d+|out|output", path[-2]) is not None
    )


def _number(path: Path) -> float:
    digits = re.sub(r"\D", "", path[-2])
    return float(digits) if digits else float("inf")


def _moved_back(axis: int, stack_axis: int, rank: int) -> int:
    """Where an axis, counted from the end, was before the stack came in front."""
    index = axis + rank
    return (index - 1 if index <= stack_axis else index) - rank


def _tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _squeeze(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    return axes[0] if len(axes) == 1 else axes

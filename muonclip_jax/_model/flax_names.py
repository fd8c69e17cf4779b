"""What the parameter names and shapes of stock Flax modules say about a leaf.

This is the one place that knows how Linen and NNX name things. Both spell a layer
`<module>/kernel` and `<module>/bias`, and attention
`<module>/{query,key,value,out}/{kernel,bias}`.
"""

import functools
import re
from collections.abc import Sequence

from optax.contrib import MuonDimensionNumbers

from .heads_or_stack import Neighbours, PROJECTIONS, Projections
from .paths import is_masked, Path, PathedTree
from .stack_axes import IN_FRONT, ModuleStacks, Shape, StackAxes


_VECTORS = frozenset({"bias", "scale", "mean", "var"})
_EMBEDDINGS = frozenset({"wte", "wpe"})
_HEADS = frozenset({"head", "logits", "unembed", "classifier", "vocab"})


class Ambiguous(Exception):
    """The names and the shape of a leaf leave its axes open."""


class FlaxTree:
    """A parameter tree that can be asked what each of its leaves is.

    Shapes and axes are those of one layer where a stack is named, until the answer.
    """

    def __init__(
        self,
        tree: PathedTree,
        *,
        per_head: bool = False,
        stack_axes: StackAxes = IN_FRONT,
    ):
        self._per_head = per_head
        self._leaves = tree.by_path()
        self._stacks = ModuleStacks(stack_axes, self._leaves)
        self._shape = self._stacks.layer
        self._neighbours = Neighbours(self._leaves, self._shape)
        self._with_heads: dict[Path, bool | None] = {}

    def dimension_numbers(self, path: Path) -> MuonDimensionNumbers | None:
        """Says which axes of a leaf form its matrices; `None` if it holds none."""
        numbers, stack = self._in_layer(path), self._stacks.of(path)
        if numbers is None or not stack.depth:
            return numbers
        rank = len(self._stacks.shape(path))
        reduction, output = (
            _squeeze(tuple(stack.axis(axis, rank) for axis in _tuple(axes)))
            for axes in numbers
        )
        return MuonDimensionNumbers(reduction, output)

    def _in_layer(self, path: Path) -> MuonDimensionNumbers | None:
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
        return [
            module
            for module in self._leaves.modules_with(("query", "kernel"))
            if (*module, "key", "kernel") in self._leaves
            # A hidden array named `query`, beside a key in sight, is no projection.
            and (
                self._leaves.get((*module, "query", "kernel")) is not None
                or is_masked(self._leaves[*module, "key", "kernel"])
            )
        ]

    def has_leaf(self, path: Path) -> bool:
        return path in self._leaves

    def rank(self, path: Path) -> int:
        return len(self._stacks.shape(path))

    def is_plain(self, module: Path) -> bool:
        """Whether the projections of a module are known to have no axis of heads."""
        has_query = bool(self._projections(module).query)
        return has_query and self._has_heads(module) is False

    def _has_heads(self, module: Path) -> bool | None:
        """Whether the projections of a module have an axis of heads; `None` if open."""
        if module not in self._with_heads:
            found = self._projections(module)
            self._with_heads[module] = (
                self._neighbours.has_heads(module, found)
                if len(found.query) > 2
                else False
            )
        return self._with_heads[module]

    def _projections(self, module: Path) -> Projections:
        """The shapes of its kernels, with the first in sight for the query."""
        names = ("query", "wq_b", "key", "value")
        query, *others = (self._shape((*module, name, "kernel")) for name in names)
        low_rank, key, value = others
        return Projections(query or low_rank or key or value, key, value)

    def _kernel(self, module: Path, shape: Shape) -> MuonDimensionNumbers:
        if len(shape) == 2:
            return MuonDimensionNumbers(-2, -1)
        numbers = self._of_attention(module[:-1], module[-1], shape) if module else None
        numbers = numbers or self._split_by_bias(module)
        return numbers or self._split_by_name(module, shape)

    def _of_attention(
        self, module: Path, name: str, shape: Shape
    ) -> MuonDimensionNumbers | None:
        """Of the projections of an attention module; `None` for all else."""
        has_heads, found = self._has_heads(module), self._projections(module)
        if name in PROJECTIONS:
            if has_heads is None:
                raise Ambiguous
            if has_heads:
                return MuonDimensionNumbers(-3, -1 if self._per_head else (-2, -1))
        elif self.is_plain(module) and shape[:-2] == found.query[:-2]:
            return MuonDimensionNumbers(-2, -1)
        elif has_heads:
            is_out = name == "out" or shape[:-2] != found.query[:-2]
            inputs = found.inputs_of_out(shape) if is_out else 0
            if inputs:
                return MuonDimensionNumbers((-3, -2) if inputs == 2 else -2, -1)
        return None

    def _split_by_name(self, module: Path, shape: Shape):
        rank, last = len(shape), _tokens(module[-1:])
        # A hidden bias could have told scanned convolutions from those in 3D.
        told = rank < 5 or not self.has_leaf((*module, "bias"))
        if _starts(last, "conv") and told:
            return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)
        if _starts(last, "densegeneral", "lineargeneral", "einsum"):
            raise Ambiguous
        # A query here was found to have no heads.
        stack = rank == 3 or set(shape[:-2]) == {1} or last & {*PROJECTIONS}
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

    @functools.cached_property
    def _output_head(self) -> Path | None:
        """The last Dense beside an embedding, if its shape is the embedding's turned.

        A decoder that leaves its head unnamed (`Dense_7`) is known by this alone.
        """
        embeddings = [path for path in self._leaves if path[-1:] == ("embedding",)]
        last: dict[Path, Path] = {}
        for path in self._leaves if embeddings else ():
            if _is_unnamed_dense(path):
                parent = path[:-2]
                last[parent] = max(last.get(parent, path), path, key=_number)
        for path in embeddings:
            dense = last.get(path[:-2])
            if dense and self._shape(dense) == self._shape(path)[::-1] != ():
                return dense
        return None


def _is_embedding(path: Path) -> bool:
    """Whether a leaf, or the module that holds it, is named as an embedding."""
    return any(
        "embed" in name.lower() or name.lower() in _EMBEDDINGS for name in path[-2:]
    )


def _tokens(names: Path) -> set[str]:
    return {token for name in names for token in re.split(r"[^a-z]+", name.lower())}


def _starts(tokens: set[str], *beginnings: str) -> bool:
    return any(token.startswith(beginnings) for token in tokens)


def _is_unnamed_dense(path: Path) -> bool:
    """Whether a leaf is the kernel of a `Dense_<number>`, or of an `out`."""
    return path[-1:] == ("kernel",) and any(
        re.fullmatch(r"Dense_\d+|out|output", name) for name in path[-2:-1]
    )


def _number(path: Path) -> float:
    digits = re.sub(r"\D", "", path[-2])
    return float(digits) if digits else float("inf")


def _tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _squeeze(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    return axes[0] if len(axes) == 1 else axes

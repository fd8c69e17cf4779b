"""What the parameter names and shapes of stock Flax modules say about a leaf.

This is the one place that knows how Linen and NNX name things; it needs neither
installed. Both spell a layer `<module>/kernel` and `<module>/bias`, and attention
`<module>/{query,key,value,out}/{kernel,bias}`.
"""

import re
from typing import Any

from optax.contrib import MuonDimensionNumbers

from ._paths import is_masked, Path, PathedTree


_VECTORS = frozenset({"bias", "scale", "mean", "var"})
_EMBEDDINGS = frozenset({"wte", "wpe"})
_HEADS = frozenset({"head", "logits", "unembed", "classifier", "vocab"})
_PROJECTIONS = ("query", "key", "value")


class Ambiguous(Exception):
    """The names and the shape of a leaf leave its axes open."""


class FlaxTree:
    """A parameter tree that can be asked what each of its leaves is."""

    def __init__(self, tree: PathedTree):
        self._leaves = dict(zip(tree.paths, tree.leaves, strict=True))
        self._output_head = self._find_output_head()

    def dimension_numbers(self, path: Path) -> MuonDimensionNumbers | None:
        """Says which axes of a leaf form its matrices; `None` if it holds none."""
        name, module = path[-1] if path else "", path[:-1]
        rank = len(self._shape(path))
        if rank < 2 or name in _VECTORS or is_embedding(path):
            return None
        if name == "kernel":
            if _tokens(path[-2:-1]) & _HEADS or path == self._output_head:
                return None
            return self._kernel(module, rank)
        if rank == 2:
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

    def _kernel(self, module: Path, rank: int) -> MuonDimensionNumbers:
        if rank == 2:
            return MuonDimensionNumbers(-2, -1)
        if self._is_stock_attention(module[:-1]):
            if module[-1] in _PROJECTIONS:
                return MuonDimensionNumbers(-3, (-2, -1))
            if module[-1] == "out":
                return MuonDimensionNumbers((-3, -2), -1)
        split = self._split_by_bias(module)
        if split is not None:
            return split
        tokens = _tokens(module[-1:])
        if any(token.startswith("conv") for token in tokens):
            return MuonDimensionNumbers(tuple(range(-rank, -1)), -1)
        if any(
            token.startswith(("densegeneral", "lineargeneral", "einsum"))
            for token in tokens
        ):
            raise Ambiguous
        return MuonDimensionNumbers(-2, -1)

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
        query = self._shape((*module, "query", "kernel"))
        value = self._shape((*module, "value", "kernel"))
        out = self._shape((*module, "out", "kernel"))
        if len(query) < 3:
            return False
        if not out:
            return True
        return (
            len(out) == len(query)
            and out[-3] == query[-2]
            and (not value or out[-2] == value[-1])
        )

    def _find_output_head(self) -> Path | None:
        """The Dense beside the embedding whose shape is that of its transpose.

        A decoder that leaves its head unnamed (`Dense_7`) is known by this alone.
        """
        found = []
        for path in self._leaves:
            if path[-1:] == ("embedding",):
                found += [p for p in self._leaves if self._is_head_for(p, path)]
        return max(found, key=_natural, default=None)

    def _is_head_for(self, path: Path, embedding: Path) -> bool:
        return (
            len(path) == len(embedding)
            and path[-1] == "kernel"
            and path[:-2] == embedding[:-2]
            and self._shape(path) == self._shape(embedding)[::-1] != ()
        )

    def _shape(self, path: Path) -> tuple[int, ...]:
        leaf: Any = self._leaves.get(path)
        return () if leaf is None or is_masked(leaf) else tuple(leaf.shape)


def is_embedding(path: Path) -> bool:
    """Whether a leaf, or the module that holds it, is named as an embedding."""
    return any(
        "embed" in name.lower() or name.lower() in _EMBEDDINGS for name in path[-2:]
    )


def _tokens(names: Path) -> set[str]:
    return {token for name in names for token in re.split(r"[^a-z]+", name.lower())}


def _natural(path: Path) -> list[Any]:
    return [[int(s) if s.isdigit() else s for s in re.split(r"(\d+)", n)] for n in path]


def _squeeze(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    return axes[0] if len(axes) == 1 else axes

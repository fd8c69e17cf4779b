"""The projections of attention, by their shapes together and what lies beside."""

import math
from collections.abc import Callable, Iterable

from .heads_or_stack import Neighbours, PROJECTIONS, Projections
from .paths import Path
from .stack_axes import Shape


Sides = tuple[tuple[int, ...], tuple[int, ...]]  # inputs and outputs, from the end


class OpenHeads(Exception):
    """Nothing tells whether projections have an axis of heads."""


class AttentionShapes:
    """Modules with query, key and value, in Flax's words and one layer of the model."""

    def __init__(self, paths: Iterable[Path], shape_of: Callable[[Path], Shape]):
        self._shape_of = shape_of
        self._neighbours = Neighbours(paths, shape_of)
        self._with_heads: dict[Path, bool | None] = {}

    def is_plain(self, module: Path) -> bool:
        """Whether the projections of a module are known to have no axis of heads."""
        has_query = bool(self.projections(module).query)
        return has_query and self.has_heads(module) is False

    def has_heads(self, module: Path) -> bool | None:
        """Whether the projections of a module have an axis of heads; `None` if open."""
        if module not in self._with_heads:
            found = self.projections(module)
            self._with_heads[module] = (
                self._neighbours.has_heads(module, found)
                if len(found.query) > 2
                else False
            )
        return self._with_heads[module]

    def projections(self, module: Path) -> Projections:
        """The shapes of its kernels, with the first in sight for the query."""
        names = ("query", "wq_b", "key", "value")
        query, *others = (self._shape_of((*module, name, "kernel")) for name in names)
        low_rank, key, value = others
        return Projections(query or low_rank or key or value, key, value)

    def sides(self, module: Path, name: str, shape: Shape) -> Sides | None:
        """Inputs and outputs of a kernel right below; `None` if this says nothing.

        **Raises:** `OpenHeads`.
        """
        if self._is_grouped(module):
            rank = len(shape)
            inputs = rank - 1 if name == "out" else 1
            return _at_end(rank, inputs) if name in (*PROJECTIONS, "out") else None
        has_heads, found = self.has_heads(module), self.projections(module)
        if name in PROJECTIONS:
            if has_heads is None:
                raise OpenHeads
            return ((-3,), (-2, -1)) if has_heads else None
        if self.is_plain(module) and shape[:-2] == found.query[:-2]:
            return (-2,), (-1,)
        if has_heads and (name == "out" or shape[:-2] != found.query[:-2]):
            inputs = found.inputs_of_out(shape)
            return (tuple(range(-1 - inputs, -1)), (-1,)) if inputs else None
        return None

    def _is_grouped(self, module: Path) -> bool:
        """Whether heads lie in two axes: `(features, key_heads, groups, head_dim)`."""
        query, key, value, out = (
            self._shape_of((*module, name, "kernel"))
            for name in ("query", "key", "value", "out")
        )
        if not (len(query) == 4 and len(key) == len(value) == len(out) == 3):
            return False
        same_features = query[0] == key[0] == value[0] == out[-1]
        same_heads = math.prod(query[1:]) == math.prod(out[:-1])
        return same_features and same_heads and query[1] == key[1]


def _at_end(rank: int, inputs: int) -> Sides:
    axes = tuple(range(-rank, 0))
    return axes[:inputs], axes[inputs:]

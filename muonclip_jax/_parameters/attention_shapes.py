"""The projections of attention, by their shapes together and what lies beside.

`(*stack, features, heads, head_dim)` and `(*stack, inputs, outputs)` may be one shape.
What else the layer has tells: its biases, the kernels and vectors beside, its sizes.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .paths import Path
from .stack_axes import Shape


Sides = tuple[tuple[int, ...], tuple[int, ...]]  # inputs and outputs, from the end

_ENDS = ("kernel", "bias", "scale")

#: Modules of query, key and value in Flax, and in MaxText's latent attention.
PROJECTIONS = ("query", "key", "value", "wq_b", "wkv_b")


class Projections(NamedTuple):
    """The shapes of three kernels in one layer of the model; `()` for one unknown."""

    query: Shape
    key: Shape = ()
    value: Shape = ()

    def inputs_of_out(self, kernel: Shape) -> int:
        """How many axes of heads a kernel sums over, as the output does; 0 if none."""
        *stack, _, heads, _ = self.query
        head_dim = self.value[-1:] or kernel[-2:-1]
        if kernel[:-1] == (*stack, heads, *head_dim):
            return 2
        if len(kernel) == len(self.query) - 1 and kernel[:-2] == tuple(stack):
            if self.value:
                return int(kernel[-2] == heads * self.value[-1])
            return int(kernel[-2] % max(1, heads) == 0)
        return 0

    def by_kernels(self, kernels: Iterable[Shape]) -> bool | None:
        """What kernels beside say: one takes heads in, or has as many layers."""
        votes = {
            (self.inputs_of_out(kernel) > 0, kernel[:-2] == self.query[:-2])
            for kernel in kernels
        }
        if (True, False) in votes:
            return True
        return False if (False, True) in votes else None

    def is_strange(self, kernel: Shape) -> bool:
        """Whether a kernel beside fits neither, as where stacks lie elsewhere."""
        same_rank = len(kernel) == len(self.query)
        return same_rank and not (
            self.inputs_of_out(kernel) or kernel[:-2] == self.query[:-2]
        )

    def by_sizes(self) -> bool | None:
        """What sizes say that would be a coincidence otherwise."""
        *_, features, heads, head_dim = self.query
        if len(self.key) == len(self.query):
            if self.key[-1] != head_dim:
                return False
            if self.key[-3] != features:
                return True
            if heads < features and self.key[-2] != heads:
                return heads % max(1, self.key[-2]) == 0
        if len(self.query) > 3 or features == heads * head_dim:
            return True
        return None if self.value or features < heads else True


def by_bias(kernel: Shape, bias: Shape) -> bool | None:
    """What a bias says, which has the outputs of its kernel; `None` for either."""
    if not bias:
        return None
    heads, stack = kernel[:-3] + kernel[-2:], kernel[:-2] + kernel[-1:]
    return bias == heads if heads != stack else None


class Neighbours:
    """The kernels and vectors right below each module."""

    def __init__(self, paths: Iterable[Path], shape_of: Callable[[Path], Shape]):
        self._paths, self._shape_of = paths, shape_of

    def has_heads(self, module: Path, found: Projections) -> bool | None:
        """Whether the projections of a module have an axis of heads; `None` if open."""
        for name, kernel in zip(found._fields, found, strict=True):
            told = kernel and by_bias(kernel, self._shape_of((*module, name, "bias")))
            if isinstance(told, bool):
                return told
        rank = len(found.query)
        for depth in range(len(module), -1, -1):
            kernels, vectors = self.below(module[:depth])
            if depth < len(module):  # what is further off may be outside of the stack
                kernels = {kernel for kernel in kernels if len(kernel) == rank}
            told = found.by_kernels(kernels)
            if told is not None:
                return told
            if depth == len(module) and any(map(found.is_strange, kernels)):
                return None
            if any(vector[:-1] == found.query[:-2] for vector in vectors):
                return False
        return found.by_sizes()

    def below(self, module: Path) -> tuple[set[Shape], set[Shape]]:
        return self._by_module.get(module, (set(), set()))

    @functools.cached_property
    def _by_module(self) -> dict[Path, tuple[set[Shape], set[Shape]]]:
        below: dict[Path, tuple[set[Shape], set[Shape]]] = {}
        for path in self._paths:
            if len(path) > 1 and path[-1] in _ENDS and path[-2] not in PROJECTIONS:
                both = below.setdefault(path[:-2], (set(), set()))
                both[path[-1] != "kernel"].add(self._shape_of(path))
        return below


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
            self._with_heads[module] = self._is_grouped(module) or (
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

"""Matrices of leaves that share a stack: a static plan, and how to follow it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .unstack import unstack
from .view import MatrixView


class Part(NamedTuple):
    """The matrices of one leaf, by its index, in a stack."""

    leaf: int
    view: MatrixView


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape and dtype, those of each leaf after those of another."""

    shape: tuple[int, int]  # of a matrix
    dtype: str
    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        return sum(part.view.count for part in self.parts)

    def gather(
        self,
        leaves: Sequence[Any],
        to_stack: Callable[[MatrixView, jax.Array], jax.Array],
    ) -> jax.Array:
        """Makes the stack of what `to_stack` makes of each leaf."""
        stacks = [to_stack(part.view, leaves[part.leaf]) for part in self.parts]
        return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)

    def scatter(self, stack: jax.Array, results: list[Any], *, on_cpu: bool) -> None:
        """Puts the leaves into `results`: float32 or wider, whatever the stack is."""
        dtype = np.promote_types(jnp.dtype(self.dtype), jnp.float32)
        pieces = unstack(stack, [part.view.count for part in self.parts], on_cpu)
        for part, matrices in zip(self.parts, pieces, strict=True):
            results[part.leaf] = part.view.from_matrices(matrices).astype(dtype)

    def __str__(self) -> str:
        m, n = self.shape
        leaves = "leaf" if len(self.parts) == 1 else "leaves"
        return f"{self.count} x {m} x {n} {self.dtype} from {len(self.parts)} {leaves}"


def plan_stacks(
    leaves: Sequence[Any],
    views: Sequence[MatrixView | None],
    max_entries: float = math.inf,
    max_leaves: float = math.inf,
) -> list[Stack]:
    """Groups matrices by shape and dtype.

    `leaves` need only a dtype, so abstract ones will do. Nothing is padded: matrices
    of different shapes, or of different dtypes, never share a stack. A stack has at
    most `max_leaves` leaves, and at most `max_entries` entries if of more than one.
    """
    groups: dict[tuple[tuple[int, int], str], list[Part]] = {}
    for index, (leaf, view) in enumerate(zip(leaves, views, strict=True)):
        if view is not None:
            key = view.matrix_shape, jnp.dtype(leaf.dtype).name
            groups.setdefault(key, []).append(Part(index, view))
    return [
        Stack(shape, dtype, tuple(parts))
        for (shape, dtype), group in groups.items()
        for parts in _cut_group(group, max_entries, max_leaves)
    ]


def _cut_group(
    group: list[Part], max_entries: float, max_leaves: float
) -> Iterator[list[Part]]:
    parts, entries = [], 0
    for part in group:
        size = math.prod(part.view.shape)
        if parts and (entries + size > max_entries or len(parts) >= max_leaves):
            yield parts
            parts, entries = [], 0
        parts.append(part)
        entries += size
    yield parts

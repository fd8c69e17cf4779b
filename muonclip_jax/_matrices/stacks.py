"""Which matrices of which leaves share a stack: a static plan, and how to follow it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .unstack import unstack
from .view import MatrixView


Transform = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One leaf's place in a stack."""

    leaf: int
    view: MatrixView

    @property
    def is_tall(self) -> bool:
        return self.view.fan_in > self.view.fan_out

    @property
    def size(self) -> int:
        return self.view.count * self.view.fan_in * self.view.fan_out

    def to_stack(self, leaf: jax.Array) -> jax.Array:
        matrices = self.view.to_matrices(leaf)
        return matrices.mT if self.is_tall else matrices

    def from_stack(self, matrices: jax.Array) -> jax.Array:
        return self.view.from_matrices(matrices.mT if self.is_tall else matrices)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A stack of same-shape matrices of one dtype, the short side first."""

    shape: tuple[int, int]
    dtype: str
    slots: tuple[Slot, ...]

    @property
    def count(self) -> int:
        return sum(slot.view.count for slot in self.slots)

    def gather(self, leaves: Sequence[Any], prepare: Transform) -> jax.Array:
        """Returns the stack `(count, m, n)` of prepared matrices."""
        stacks = [prepare(slot.to_stack(leaves[slot.leaf])) for slot in self.slots]
        return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)

    def scatter(self, stack: jax.Array) -> Iterator[tuple[int, jax.Array]]:
        """Yields every leaf, by its index, with its matrices taken from the stack.

        They are float32 or wider, whatever the stack is.
        """
        dtype = jnp.promote_types(self.dtype, jnp.float32)
        counts = tuple(slot.view.count for slot in self.slots)
        for slot, matrices in zip(self.slots, unstack(stack, counts), strict=True):
            yield slot.leaf, slot.from_stack(matrices).astype(dtype)

    def __str__(self) -> str:
        m, n = self.shape
        leaves = "leaf" if len(self.slots) == 1 else "leaves"
        return f"{self.count} x {m} x {n} {self.dtype} from {len(self.slots)} {leaves}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every stack of a tree. Prints one line per stack."""

    buckets: tuple[Bucket, ...]

    def apply(
        self, prepare: Transform, iterate: Transform, leaves: Sequence[Any]
    ) -> list[Any]:
        """Applies `prepare` to the matrices of each leaf and `iterate` to each stack.

        Leaves outside all stacks pass through.
        """
        results = list(leaves)
        for bucket in self.buckets:
            stack = iterate(bucket.gather(leaves, prepare))
            for index, leaf in bucket.scatter(stack):
                results[index] = leaf
        return results

    def __str__(self) -> str:
        return "\n".join(str(bucket) for bucket in self.buckets)


def plan_buckets(
    leaves: Sequence[Any],
    views: Sequence[MatrixView | None],
    max_size: float = math.inf,
) -> Plan:
    """Groups matrices by shape, after transposition of the tall ones, and by dtype.

    `leaves` need only a dtype, so abstract ones will do. Nothing is padded: matrices
    of different shapes, or of different dtypes, never share a stack. A stack of more
    than one leaf has at most `max_size` entries.
    """
    slots: dict[tuple[tuple[int, int], str], list[Slot]] = {}
    for index, (leaf, view) in enumerate(zip(leaves, views, strict=True)):
        if view is not None:
            short, long = sorted((view.fan_in, view.fan_out))
            key = (short, long), jnp.dtype(leaf.dtype).name
            slots.setdefault(key, []).append(Slot(index, view))
    return Plan(
        tuple(
            Bucket(shape, dtype, part)
            for (shape, dtype), members in slots.items()
            for part in _parts(members, max_size)
        )
    )


def _parts(slots: list[Slot], max_size: float) -> Iterator[tuple[Slot, ...]]:
    part, size = [], 0
    for slot in slots:
        if part and size + slot.size > max_size:
            yield tuple(part)
            part, size = [], 0
        part.append(slot)
        size += slot.size
    yield tuple(part)

"""Matrices of leaves that share a stack: a static plan, and how to follow it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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

    def scatter(
        self,
        stack: jax.Array,
        results: list[Any],
        *,
        on_cpu: bool,
        store_from: float = math.inf,
    ) -> None:
        """Puts the leaves into `results`: float32 or wider, whatever the stack is.

        A leaf of `store_from` entries or more is stored in its own shape first. XLA for
        TPU moves a reshape after what is elementwise, and would store an update in
        float32 once as it was sent and once as the leaf is: of Mixtral's update on 64
        v5p that is 1.3 of 3.9 GB of temporaries. Smaller leaves take 3 % longer for it.
        """
        dtype = np.promote_types(jnp.dtype(self.dtype), jnp.float32)
        counts = tuple(part.view.count for part in self.parts)
        pieces = unstack(stack, counts, on_cpu)
        for part, matrices in zip(self.parts, pieces, strict=True):
            leaf = part.view.from_matrices(matrices)
            if leaf.size >= store_from:
                leaf = jax.lax.optimization_barrier(leaf)
            results[part.leaf] = leaf.astype(dtype)

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
    stacks = []
    for (shape, dtype), group in groups.items():
        parts, entries = [], 0
        for part in group:
            size = math.prod(part.view.shape)
            if parts and (entries + size > max_entries or len(parts) >= max_leaves):
                stacks.append(Stack(shape, dtype, tuple(parts)))
                parts, entries = [], 0
            parts.append(part)
            entries += size
        stacks.append(Stack(shape, dtype, tuple(parts)))
    return stacks


# Compiled, since each eager call of a loop or of `platform_dependent` on new functions
# would compile them again.
@functools.partial(jax.jit, static_argnums=(1, 2))
def unstack(
    stack: jax.Array, counts: tuple[int, ...], on_cpu: bool | None = None
) -> Sequence[jax.Array]:
    """Cuts the first axis into consecutive parts of the given lengths.

    `on_cpu` is None where only the compiler knows it.
    """
    if len(counts) < 2:
        return [stack] * len(counts)

    def at_once(stack: jax.Array) -> Sequence[jax.Array]:
        # Offsets that are known let the compiler fuse and shard the parts.
        return jax.lax.split(stack, counts)

    def at_run_time(stack: jax.Array) -> Sequence[jax.Array]:
        # For CPU, XLA compiles equal kernels once, and kernels that read a stack at
        # different known offsets are not equal: with 256 leaves the update compiled in
        # 6.6 s in place of 2.9 (JAX 0.12). So offsets go through a loop, after which
        # XLA does not know them; of few numbers, since loops of many take it long, too:
        # each offset is a sum of two of about 2 sqrt(n).
        starts = list(itertools.accumulate(counts[:-1], initial=0))
        base = math.isqrt(starts[-1]) + 1
        digits = [(start - start % base, start % base) for start in starts]
        known = sorted(set(itertools.chain(*digits)))

        # XLA folds `x + 1` in a loop of two passes, and with it the loop, not `x + i`.
        def add(i: jax.Array, numbers: list[jax.Array]) -> list[jax.Array]:
            step = jnp.asarray(i, np.int32)  # under disable_jit a number
            return [jax.lax.add(number, step) for number in numbers]

        opaque = jax.lax.fori_loop(0, 2, add, [np.int32(x - 1) for x in known])
        opaque = dict(zip(known, opaque, strict=True))
        inner, matrix = (np.int32(0),) * (stack.ndim - 1), stack.shape[1:]
        parts = []
        cut = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
        for (high, low), count in zip(digits, counts, strict=True):
            first = jax.lax.add(opaque[high], opaque[low])
            parts.append(cut(stack, (first, *inner), (count, *matrix)))
        return parts

    if on_cpu is None:
        return jax.lax.platform_dependent(stack, cpu=at_run_time, default=at_once)
    return at_run_time(stack) if on_cpu else at_once(stack)

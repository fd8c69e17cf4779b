"""Leaves as stacks of matrices, and back: the view of a leaf, and stacks of several."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._options import check_whole_number
from .axes import Axes, MatrixAxes, parts_of


#: The most separate leaves in a stack: the time to compile a concatenation grows with
#: the square of the number of its arrays.
MOST_LEAVES = 256


class Division(NamedTuple):
    """Outputs that are several matrices: groups of the same parts.

    Each part has a size and a `head_dim`: it is one matrix for each head of each group;
    if that is `None`, it is one matrix of all groups.
    """

    groups: int
    parts: tuple[tuple[int, int | None], ...]


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """The matrices of one leaf: the axes of a stack of `(fan_in, fan_out)`.

    With a `division` the leaf is several of them (`pieces_of`).
    """

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    shape: tuple[int, ...]
    # Whether it is known which side is the input. Views that differ in it alone are
    # equal, since they have one program.
    is_directed: bool = dataclasses.field(default=True, compare=False)
    division: Division | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape[axis] for axis in self.batch)

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[axis] for axis in self.reduction)

    @property
    def fan_out(self) -> int:
        return math.prod(self.shape[axis] for axis in self.output)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.fan_in, self.fan_out

    @property
    def wide(self) -> "MatrixView":
        """The same matrices with the short side first: tall ones are transposed."""
        # (U S V^T)^T = V S U^T: the polar factor of the transpose is the transpose.
        if self.fan_in <= self.fan_out:
            return self
        axes = {"reduction": self.output, "output": self.reduction}
        return dataclasses.replace(self, **axes)

    def to_matrices(self, leaf: jax.Array) -> jax.Array:
        """Returns the leaf as `(count, fan_in, fan_out)`."""
        order = self.batch + self.reduction + self.output
        shape = self.count, *self.matrix_shape
        return jax.lax.reshape(jax.lax.transpose(leaf, order), shape)

    def from_matrices(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `to_matrices`."""
        order = self.batch + self.reduction + self.output
        moved = jax.lax.reshape(matrices, [self.shape[axis] for axis in order])
        return jax.lax.transpose(moved, np.argsort(order))


def matrix_view(shape: tuple[int, ...], numbers: Axes) -> MatrixView:
    """Reads axes against a shape; all axes they leave out are batch."""

    def axes_of(given: Any) -> tuple[int, ...]:
        given = tuple(given) if isinstance(given, Iterable) else (given,)
        axes = [check_whole_number("an axis", axis) for axis in given]
        for axis in axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"axis {axis} is out of range for {len(shape)} dimensions"
                )
        return tuple(axis % len(shape) for axis in axes)

    reduction, output = axes_of(numbers.reduction_axis), axes_of(numbers.output_axis)
    named = reduction + output
    if not reduction or not output or len(set(named)) < len(named):
        raise ValueError(
            f"reduction and output axes must be distinct and not empty, got {numbers}"
        )
    batch = tuple(i for i in range(len(shape)) if i not in named)
    view = MatrixView(batch, reduction, output, tuple(shape))
    if not isinstance(numbers, MatrixAxes):
        return view
    return dataclasses.replace(view, division=_division(view, numbers))


def _division(view: MatrixView, axes: MatrixAxes) -> Division | None:
    outputs, groups = view.fan_out, axes.groups
    parts = parts_of(axes, outputs)
    sizes = [size for size, _ in parts]
    if sum(sizes) * groups != outputs:
        times = f"{groups} times " if groups > 1 else ""
        raise ValueError(
            f"{times}the parts {sizes} are {sum(sizes) * groups} outputs, but the leaf "
            f"has {outputs}"
        )
    if any(j != i + 1 for i, j in itertools.pairwise(view.output)):
        raise ValueError(
            f"the outputs {axes.output_axis} are cut into parts, so they have to be "
            "adjacent axes, in order"
        )
    for part, head_dim in parts:
        if head_dim is not None and part % head_dim:
            raise ValueError(f"head_dim={head_dim} does not divide the {part} outputs")
    if groups == 1:
        # A part of one group is one matrix, as a part of one head is.
        parts = [(part, head_dim or part) for part, head_dim in parts]
    # Pieces of one size that follow one another are heads: one reshape in place of many
    # slices, and a mesh may cut between any two of them.
    size, *others = {head_dim for _, head_dim in parts}
    if size is not None and not others:
        groups, parts = outputs // size, [(size, size)]
    elif groups == 1:
        n = len(parts)
        period = next(i for i in range(1, n + 1) if parts == parts[:i] * (n // i))
        groups, parts = n // period, parts[:period]
    merged: list[tuple[int, int | None]] = []
    for part, head_dim in parts:
        if merged and head_dim is not None and merged[-1][1] == head_dim:
            part += merged.pop()[0]
        merged.append((part, head_dim))
    if len(merged) == 1 and merged[0][1] in (None, outputs):
        return None
    return Division(groups, tuple(merged))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatrixLeaf:
    """The matrices of an array, and how devices divide it.

    A pytree of the array alone: all else is known when a program is traced.
    """

    array: Any  # a `jax.Array`, or for a plan anything with its dtype
    view: MatrixView = dataclasses.field(metadata={"static": True})
    spec: PartitionSpec = dataclasses.field(
        default=PartitionSpec(), metadata={"static": True}
    )

    def with_array(self, array: jax.Array) -> "MatrixLeaf":
        """Returns the matrices of another array."""
        return dataclasses.replace(self, array=array)


#: The matrices of one leaf in a stack, after the index of the leaf.
Part = tuple[int, MatrixLeaf]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape and dtype, those of each leaf after those of another."""

    shape: tuple[int, int]  # of a matrix
    dtype: jnp.dtype
    parts: tuple[Part, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The matrices of each part."""
        return tuple(x.view.count for _, x in self.parts)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def gather(self, dtype: jnp.dtype) -> list[jax.Array]:
        """Returns the matrices of each leaf, `(count, *shape)`."""
        return [x.view.to_matrices(x.array).astype(dtype) for _, x in self.parts]

    def scatter(self, stack: jax.Array, results: list[Any]) -> None:
        """Puts the leaves of a stack into `results`."""
        pieces = unstack(stack, self.counts)
        for (i, x), matrices in zip(self.parts, pieces, strict=True):
            results[i] = x.view.from_matrices(matrices)

    def __str__(self) -> str:
        m, n = self.shape
        leaves = "leaf" if len(self.parts) == 1 else "leaves"
        return f"{self.count} x {m} x {n} {self.dtype} from {len(self.parts)} {leaves}"


def plan_stacks(leaves: Iterable[Part], max_entries: float = math.inf) -> list[Stack]:
    """Groups the matrices of leaves, which have an index, by shape and dtype.

    Arrays need only a dtype, so abstract ones will do. Nothing is padded: matrices of
    different shapes, or of different dtypes, never share a stack. A stack of several
    leaves has at most `max_entries` entries.
    """
    groups: dict[tuple[tuple[int, int], jnp.dtype], list[Part]] = {}
    for index, leaf in leaves:
        key = leaf.view.matrix_shape, jnp.dtype(leaf.array.dtype)
        groups.setdefault(key, []).append((index, leaf))
    stacks = []
    for (shape, dtype), group in groups.items():
        parts, entries = [], 0
        for part in group:
            size = math.prod(part[1].view.shape)
            if parts and (entries + size > max_entries or len(parts) == MOST_LEAVES):
                stacks.append(Stack(shape, dtype, tuple(parts)))
                parts, entries = [], 0
            parts.append(part)
            entries += size
        stacks.append(Stack(shape, dtype, tuple(parts)))
    return stacks


# Compiled, since each eager call of a loop or of `platform_dependent` on new functions
# would compile them again.
@functools.partial(jax.jit, static_argnums=1)
def unstack(stack: jax.Array, counts: tuple[int, ...]) -> Sequence[jax.Array]:
    """Cuts the first axis into consecutive parts of the given lengths."""
    if len(counts) < 2:
        return [stack] * len(counts)

    def at_once(stack: jax.Array) -> Sequence[jax.Array]:
        # Known offsets let the compiler fuse and shard the parts.
        return jax.lax.split(stack, counts)

    def at_run_time(stack: jax.Array) -> Sequence[jax.Array]:
        # For CPU, XLA compiles equal kernels once, but kernels that read a stack at
        # different known offsets differ: with 256 leaves the update compiled in 6.6 s
        # in place of 2.9 (JAX 0.12). So a loop hides the offsets from XLA. Loops of
        # many numbers compile slowly, too, so that each offset is a sum of two of
        # about 2 sqrt(n) numbers.
        starts = list(itertools.accumulate(counts[:-1], initial=0))
        base = math.isqrt(starts[-1]) + 1
        digits = [(start - start % base, start % base) for start in starts]

        # XLA folds `x + 1` in a loop of two passes, and with it the loop, not `x + i`.
        def add(i: jax.Array, numbers: dict[int, jax.Array]) -> dict[int, jax.Array]:
            step = jnp.asarray(i, np.int32)  # under disable_jit a number
            return {x: jax.lax.add(number, step) for x, number in numbers.items()}

        constants = {x: np.int32(x - 1) for x in sorted(itertools.chain(*digits))}
        opaque = jax.lax.fori_loop(0, 2, add, constants)
        inner, matrix = (np.int32(0),) * (stack.ndim - 1), stack.shape[1:]
        parts = []
        cut = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
        for (high, low), count in zip(digits, counts, strict=True):
            first = jax.lax.add(opaque[high], opaque[low])
            parts.append(cut(stack, (first, *inner), (count, *matrix)))
        return parts

    return jax.lax.platform_dependent(stack, cpu=at_run_time, default=at_once)


def zero_after(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns a 0 that is known only once all arrays are: an ordering token."""
    # Data, since XLA drops optimization barriers before it puts operations in order.
    # `isnan` is 0 or 1, and its minimum with 0 is 0, which XLA does not see through.
    numbers = [jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int32) for x in arrays]
    return jnp.minimum(sum(numbers, start=jnp.int32(0)), 0)

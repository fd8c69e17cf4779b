"""Modules whose leaves all carry a stack of layers, as their vectors give away.

In one layer a norm has one axis. Where every leaf under a module has the same sizes at
the same place, and its norms have just those axes more, they are a stack: in front, as
Flax, Haiku and Haliax put it, behind the first axis, as MaxText does, or at the end.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from . import names
from .paths import Path
from .spelled import plain_paths
from .stack_axes import Shape, Stack, stack_at, without_ones


class Found(NamedTuple):
    """Where a stack begins or, from the end, stops, and how many axes it has."""

    axis: int
    depth: int

    def of(self, rank: int) -> Stack:
        """The stack in a leaf of this rank; a number for each layer is nothing else."""
        if rank <= self.depth:
            return Stack(0, rank)
        return stack_at(self.axis, rank, self.depth) or Stack(0, 0)


class _Member(NamedTuple):
    path: Path  # in Flax's words
    shape: Shape
    is_weight: bool  # as Equinox calls a kernel


def find_stacks(shapes: Mapping[Path, Shape]) -> dict[Path, Found]:
    """The stack of every module that is one, the outermost where they are nested."""
    members: dict[Path, list[_Member]] = {}
    plain = plain_paths(shapes)
    for path, shape in shapes.items():
        member = _Member(plain[path], shape, "weight" in path[-2:])
        for depth in range(len(path)):
            members.setdefault(path[:depth], []).append(member)
    found: dict[Path, Found] = {}
    for module in sorted(members, key=len):
        if not any(module[:depth] in found for depth in range(len(module))):
            stack = _stack(members[module], lambda m=module: _widths(shapes, m))
            if stack:
                found[module] = stack
    return found


def _stack(
    members: list[_Member], widths: Callable[[], frozenset[int]]
) -> Found | None:
    vectors = [m.shape for m in members if names.is_norm(m.path)]
    places = (0, 1, -1)
    if not vectors:
        # A bias may have an axis of heads, which a kernel has behind its first.
        vectors, places = _biases_of_stacks(members), (0,)
    depth = min(map(len, vectors), default=0) - 1
    is_layer = any(names.is_kernel(m.path) or len(m.shape) > depth + 1 for m in members)
    if depth < 1 or not is_layer or _are_of_outputs(vectors, members):
        return None
    stacks = [Found(axis, depth) for axis in places]
    stacks = [stack for stack in stacks if _shared(stack, members)]
    if len(stacks) > 1:
        # Both the layers and the features are shared; features are known outside.
        known = widths()
        inner = [s for s in stacks if _features(s, vectors) <= known]
        stacks = inner or stacks
    return stacks[0] if stacks else None


def _biases_of_stacks(members: list[_Member]) -> list[Shape]:
    """All biases, if one of them is not just the last axes of its kernel."""
    biases = {m.path[:-1]: m.shape for m in members if names.is_bias(m.path)}
    told = False
    for kernel in members:
        bias = biases.get(kernel.path[:-1])
        if names.is_kernel(kernel.path) and bias:
            if kernel.is_weight:
                bias = biases[kernel.path[:-1]] = without_ones(bias)
            told |= bias != kernel.shape[-len(bias) :]
    return list(biases.values()) if told else []


def _are_of_outputs(vectors: list[Shape], members: Iterable[_Member]) -> bool:
    """Whether norms are for each output of the one kernel beside, as of each head."""
    kernels = [m.shape for m in members if names.is_kernel(m.path)]
    return len(kernels) == 1 and all(x == kernels[0][-len(x) :] for x in vectors)


def _shared(stack: Found, members: Iterable[_Member]) -> bool:
    """Whether all leaves have the sizes of the stack."""
    found = {stack.of(len(shape)).sizes(shape) for _, shape, _ in members}
    return len(found) == 1 and len(next(iter(found))) == stack.depth


def _features(stack: Found, vectors: Iterable[Shape]) -> set[int]:
    return {size for shape in vectors for size in stack.of(len(shape)).layer(shape)}


def _widths(shapes: Mapping[Path, Shape], module: Path) -> frozenset[int]:
    """The sizes of norms and embeddings outside of a module."""
    return frozenset(
        shape[-1]
        for path, shape in shapes.items()
        if path[: len(module)] != module
        and shape
        and ((len(shape) == 1 and names.is_norm(path)) or names.is_embedding(path))
    )

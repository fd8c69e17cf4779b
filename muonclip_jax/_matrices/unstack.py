"""A stack taken apart, in a program that compiles fast."""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def unstack(
    stack: jax.Array, counts: Sequence[int], on_cpu: bool | None = None
) -> Sequence[jax.Array]:
    """Cuts the first axis into consecutive parts of the given lengths.

    `on_cpu` is None where only the compiler knows it.
    """
    if len(counts) < 2:
        return [stack] * len(counts)
    return _unstack(stack, tuple(counts), on_cpu)


# Compiled, since each eager call of a loop or of `platform_dependent` on new functions
# would compile them again.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _unstack(
    stack: jax.Array, counts: tuple[int, ...], on_cpu: bool | None
) -> Sequence[jax.Array]:
    at_run_time = functools.partial(_cut_at_run_time, counts=counts)
    # Elsewhere offsets that are known let the compiler fuse and shard the parts.
    at_once = functools.partial(jax.lax.split, sizes=counts)
    if on_cpu is None:
        return jax.lax.platform_dependent(stack, cpu=at_run_time, default=at_once)
    return at_run_time(stack) if on_cpu else at_once(stack)


def _cut_at_run_time(stack: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
    """Cuts where XLA cannot see it.

    For CPU, XLA compiles equal kernels once, and kernels that read a stack at different
    known offsets are not equal: hundreds of leaves took it seconds.
    """
    matrix, inner = stack.shape[1:], (np.int32(0),) * (stack.ndim - 1)
    cut = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
    return [
        cut(stack, (start, *inner), (count, *matrix))
        for start, count in zip(_opaque_starts(counts), counts, strict=True)
    ]


def _opaque_starts(counts: Sequence[int]) -> list[jax.Array]:
    """Sums of two numbers out of few: XLA takes its time for loops of many numbers."""
    starts = list(itertools.accumulate(counts[:-1], initial=0))
    base = math.isqrt(starts[-1]) + 1
    digits = [(start - start % base, start % base) for start in starts]
    known = sorted(set(itertools.chain(*digits)))
    opaque = dict(zip(known, _opaque(known), strict=True))
    return [jax.lax.add(opaque[high], opaque[low]) for high, low in digits]


def _opaque(numbers: Sequence[int]) -> list[jax.Array]:
    # XLA folds `x + 1` in a loop of two passes, and with it the loop, but not `x + i`.
    def add(i: jax.Array, numbers: list[jax.Array]) -> list[jax.Array]:
        step = jnp.asarray(i, np.int32)  # under disable_jit a number
        return [jax.lax.add(number, step) for number in numbers]

    return jax.lax.fori_loop(0, 2, add, [np.int32(number - 1) for number in numbers])

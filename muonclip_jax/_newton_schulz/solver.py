"""Newton-Schulz as the user set it up: prepares matrices, iterates, knows the cost."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import platforms
from .batches import map_batches, map_first, most_matrices, OfBatches
from .coefficients import is_stable, Schedule
from .gram_restarts import cut_into_passes
from .iterations import iterate
from .loops import iterate_in_loops, iterate_traced
from .platforms import Platform
from .precondition import precondition, Preconditioning
from .products import kernel_products, Products, round_to, xla_products
from .steps import range_of
from .turns import take_turns


Method = Literal["auto", "standard", "gram"]
Kernel = Literal["xla", "pallas", "auto"]

#: From this aspect ratio on `method="auto"` takes the Gram form. In multiplications of
#: `m^3` a further step costs `2r + 1` in the standard form and 4 in the Gram form for
#: an aspect ratio `r`: the break-even is 1.5 for any number of steps. In two blocks it
#: is 1.29 on paper and was measured between 1.33 and 1.5.
GRAM_ASPECT_RATIO = 1.5


class Strategy(NamedTuple):
    """Which form of the iteration, in how many row blocks, and whether by a kernel."""

    gram: bool
    blocks: int
    kernel: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("ns_steps",),
    meta_fields=(
        *("schedule", "method", "dtype", "preconditioning", "kernel", "platform"),
    ),
)
@dataclasses.dataclass(frozen=True)
class Solver:
    """Newton-Schulz with all that the user chose, and the platform once it is known.

    A pytree, so that it passes through `jit` and `shard_map` like any argument: static
    but for a traced number of steps. Methods on arrays take and return `(..., m, n)`
    and are traced once for all leaves and stacks of a shape. Kernels for GPU want the
    short side first.
    """

    schedule: Schedule
    method: Method
    dtype: jnp.dtype | None
    preconditioning: Preconditioning
    kernel: Kernel
    ns_steps: jax.Array | None = None  # only if traced
    platform: Platform | Literal["not known yet"] = "not known yet"

    def on(self, platform: Platform) -> "Solver":
        return dataclasses.replace(self, platform=platform)

    def orthogonalize(self, *stacks: jax.Array) -> list[jax.Array]:
        return self.iterate(*map(self.prepare, stacks))

    @jax.jit
    def prepare(self, *parts: jax.Array) -> jax.Array:
        """Singular values in [0, 1], in the dtype of the iteration and its size.

        Of several parts of a stack it makes one.
        """
        dtype = self.iteration_dtype(parts[0].dtype)
        size = range_of(dtype).first_size
        on_gpu = self.platform == "gpu"
        y = precondition(parts, self.preconditioning, on_gpu=on_gpu) / size
        # On GPU rounding goes along with putting matrices together.
        return y.astype(dtype) if on_gpu else round_to(y, dtype)

    @jax.jit
    def iterate(
        self, *stacks: jax.Array, halfway: jax.Array | None = None
    ) -> list[jax.Array]:
        """Runs all steps on stacks of matrices of one shape, which take turns.

        The last is not rounded to the dtype of the iteration where that costs nothing.
        The later passes begin when the zero `halfway` is known.
        """
        shape, dtype = tuple(sorted(stacks[0].shape[-2:])), stacks[0].dtype
        strategy = self.strategy(shape, dtype)
        options: Any = dict(
            passes=self.passes(strategy, dtype),
            products=self._products(strategy, dtype),
            blocks=strategy.blocks,
        )

        def usual(*stacks: jax.Array) -> list[jax.Array]:
            if self._loops(dtype) and halfway is None:
                return [iterate_in_loops(x, **options) for x in stacks]
            return take_turns(iterate(x, **options, halfway=halfway) for x in stacks)

        if self.ns_steps is None:
            return usual(*stacks)
        other = functools.partial(
            iterate_traced,
            schedule=self.schedule,
            products=xla_products(dtype, exact=False),
            blocks=strategy.blocks,
            ns_steps=self.ns_steps,
        )
        return jax.lax.cond(
            self.ns_steps == len(self.schedule),
            usual,
            lambda *stacks: [*map(other, stacks)],
            *stacks,
        )

    def map(self, function: OfBatches, stack: jax.Array) -> jax.Array:
        """Applies a function of matrices to as many of a stack at once as do well."""
        return map_batches(
            function,
            stack,
            platforms.BATCH_ENTRIES[self.platform],
            turns=self.turns,
            most_unrolled=platforms.UNROLLED[self.platform],
        )

    def map_first(
        self, function: OfBatches, stack: jax.Array, count: jax.Array, zero: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The same for the first `count`: begins when `zero` is known.

        The zero that it returns is known when it is done.
        """
        most = platforms.BATCH_ENTRIES[self.platform]
        return map_first(function, stack, most, count, zero, turns=self.turns)

    def pieces(self, shape: tuple[int, int], count: int) -> int:
        """In how many pieces so many matrices do well to travel."""
        worthwhile = count * math.prod(shape) // platforms.PIECE_ENTRIES
        return max(1, min(count, worthwhile, platforms.PIECES[self.platform]))

    def batch_size(self, shape: tuple[int, int]) -> int:
        """How many matrices are iterated at once where there are enough."""
        return most_matrices(shape, platforms.BATCH_ENTRIES[self.platform])

    def is_large(self, shape: tuple[int, int], count: int) -> bool:
        """Whether so many matrices are more than a batch."""
        most = platforms.BATCH_ENTRIES[self.platform]
        return count > 1 and count * math.prod(shape) > most

    @property
    def turns(self) -> int:
        """How many stacks of one shape do well to take turns."""
        return platforms.TURNS[self.platform]

    @property
    def most_stacked(self) -> tuple[float, int]:
        """The most entries of separate leaves that are put together, and leaves."""
        return platforms.STACK_ENTRIES[self.platform], platforms.STACK_LEAVES

    def strategy(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Strategy:
        """Chooses for `shape`, the short side first, and the dtype of the iteration."""
        m, n = shape
        on_cpu, is_short = self.platform == "cpu", jnp.finfo(dtype).bits == 16
        # The Gram form needs exact products: elsewhere those of float32 are several
        # times as slow as what the standard form makes do with.
        pays = (on_cpu or is_short) and n >= GRAM_ASPECT_RATIO * m
        can_split = on_cpu and m >= platforms.BLOCKS * platforms.BLOCK_ROWS
        is_large = m >= platforms.KERNEL_ROWS[self.platform]
        return Strategy(
            gram=self.method == "gram" or (self.method == "auto" and pays),
            blocks=platforms.BLOCKS if can_split else 1,
            kernel=self.kernel != "xla" and is_large and self._has_kernel(shape, dtype),
        )

    def _loops(self, dtype: jnp.dtype) -> bool:
        """Whether steps do better as a loop, which rounds the last one too."""
        return self.platform == "cpu" and jnp.finfo(dtype).bits > 16

    def _has_kernel(self, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
        if self.platform == "tpu":
            return jnp.finfo(dtype).bits == 16
        # Pallas is slow to import, and most programs never ask for it.
        from .kernels import gpu

        is_full = self.kernel == "pallas" or shape[0] % platforms.KERNEL_TILE == 0
        return dtype == jnp.float16 and is_full and gpu.can_multiply(shape)

    def passes(self, strategy: Strategy, dtype: jnp.dtype) -> Sequence[Schedule]:
        """The standard form is that with a step a pass."""
        if strategy.gram:
            return cut_into_passes(self.schedule, dtype.name)
        return [(triple,) for triple in self.schedule]

    def iteration_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype to iterate matrices of `dtype` in."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return np.promote_types(self.dtype or dtype, jnp.complex64)
        if self.dtype is not None or dtype == jnp.float64:
            return self.dtype or dtype
        fast = platforms.ITERATION_DTYPES[self.platform]
        return jnp.dtype(fast if is_stable(self.schedule, fast) else "float32")

    def wire_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype in which matrices of `dtype` travel between devices.

        Not float16: the matrices have no norm yet.
        """
        iterated = self.iteration_dtype(dtype)
        is_short = jnp.finfo(iterated).bits == 16
        return jnp.dtype(jnp.bfloat16) if is_short else iterated

    def cost(self, shape: tuple[int, ...], dtype: jnp.dtype) -> float:
        """The multiplications that a matrix of `shape` takes.

        Products with the long side, and of the short one with itself, as `iterations`
        has them.
        """
        m, n = sorted(shape)
        dtype = self.iteration_dtype(dtype)
        passes = self.passes(self.strategy((m, n), dtype), dtype)
        return sum(2 * m * m * n + (4 * len(steps) - 3) * m**3 for steps in passes)

    def _products(self, strategy: Strategy, dtype: jnp.dtype) -> Products:
        fused = self.platform == "gpu" and dtype == jnp.float16
        if not strategy.kernel:
            # The Gram form squares the spectrum, and so needs all the bits there are.
            return xla_products(dtype, exact=strategy.gram, fused=fused)
        if self.platform == "tpu":
            from .kernels import tpu as kernel
        else:
            from .kernels import gpu as kernel
        return kernel_products(kernel.symmetric_product, dtype, fused=fused)

"""The solver of stacks on one device: a user's function, or Newton-Schulz.

A `Solver` is what was chosen and the platform that it runs on, once that is known: how
many matrices are iterated at once, what they cost and in which dtype they are sent.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import shown
from . import sums_in_products
from .coefficients import Schedule
from .iteration import (
    collected,
    cost,
    iterate,
    Passes,
    precondition,
    Preconditioning,
    Products,
    round_to,
)


#: From this aspect ratio on `method="auto"` uses the Gram form. In multiplications of
#: `m^3` a further step costs `2r + 1` in the standard form and 4 in the Gram form for
#: an aspect ratio `r`: the break-even is 1.5 for any number of steps.
GRAM_ASPECT_RATIO = 1.5


@dataclasses.dataclass(frozen=True)
class Platform:
    """Properties of a kind of device.

    - `iteration_dtype`: the fastest that it multiplies.
    - `batch_entries`: the most entries of matrices that are iterated at once.
    - `block_entries`: the same, of matrices that come in blocks from several devices.
    - `stack_entries`: the most entries of separate leaves that are put together.
    - `block_rows`: the least rows of each of two blocks of Hermitian products.
    - `adds_in_products`: whether a product of float16 and a sum with it are one kernel.
    - `sums_rows`: whether norms are sums of rows, and their sums one kernel for all
        leaves of a stack.
    - `turns_tall`: whether to iterate a tall matrix as a wide one, which lets both
        share a stack. On an accelerator that would be a copy in float32; on a GPU the
        momentum would be computed twice for it. By its compiler that is 0.3 of GPT-2's
        3.9 ms on an H100; that two batches of 12 are as fast as one of 24, a card has
        to confirm.
    - `waits`: whether a stack is prepared only once the one before it is done. XLA
        would prepare all of them first, as large as the model; for TPU it does not, and
        to wait costs Llama-1B 18 % more temporaries.
    """

    name: str
    iteration_dtype: str
    batch_entries: int
    stack_entries: int
    block_rows: float = math.inf
    adds_in_products: bool = False
    sums_rows: bool = False
    turns_tall: bool = True
    waits: bool = True
    block_entries: float = math.inf
    is_rolled: bool = False


#: On CPU one matrix at a time, unless it is tiny, goes through all steps in the caches.
CPU = Platform("cpu", "float32", 2**14, 2**25, block_rows=128, is_rolled=True)
#: Singular values stay below 2, so the range of float16 suffices, and it has eight
#: times the precision of bfloat16.
GPU = Platform(
    name="gpu",
    iteration_dtype="float16",
    batch_entries=2**27,
    stack_entries=2**27,
    adds_in_products=True,
    sums_rows=True,
    turns_tall=False,
)
#: The best of several values, by the compiler for v5p
#: (`benchmarks/tpu_ahead_of_time.py`).
#: Several matrices arrive as blocks of one device after those of another, and to put
#: each together is a copy: two of 2,048 x 2,048 take 7 % longer than one by one, and
#: two of 2,048 x 512, whose products are short, 20 % less.
TPU = Platform(
    "tpu",
    "bfloat16",
    10 * 2**20,
    5 * 2**20,
    turns_tall=False,
    waits=False,
    block_entries=2 * 2**20,
)
#: By the name that JAX gives them; the last is for all others.
PLATFORMS = {"cpu": CPU, "tpu": TPU, "default": GPU}


# A static pytree, so that it goes through `jit` and `shard_map` like any argument.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Solver:
    """Orthogonalizes stacks by a user's function, which keeps their shape.

    Methods on arrays take and return `(..., m, n)`.
    """

    function: Any
    #: The platform of the program, once `on_its_platform` has set it.
    platform: Platform = dataclasses.field(default=CPU, kw_only=True)
    #: The number of a stack among those of its shape in a program; `None` in a loop.
    nth: int | None = dataclasses.field(default=None, kw_only=True)

    #: Whether the transpose of a matrix gives the transpose of the result.
    commutes_with_transposition = False

    def on_its_platform(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function(solver, *arguments)` with the solver of the platform.

        Only the compiler knows the platform, which need not be the default backend's.
        So the function is traced for each, as `jax.export` for several needs.
        """

        def branch(platform: Platform) -> Callable[..., Any]:
            return lambda solver, *arguments: function(
                dataclasses.replace(solver, platform=platform), *arguments
            )

        branches = {name: branch(platform) for name, platform in PLATFORMS.items()}
        return jax.lax.platform_dependent(self, *arguments, **branches)

    def of_stack(self, nth: int) -> "Solver":
        """Returns the solver of the `nth` stack of a shape in a program."""
        # If stacks have no factors of their own, one program serves all of them.
        has_own_factors = self.platform.adds_in_products
        return dataclasses.replace(self, nth=nth) if has_own_factors else self

    def orthogonalize(self, stack: jax.Array) -> jax.Array:
        return self.iterate(self.prepare(stack))

    @functools.partial(jax.jit, static_argnums=0)
    def prepare(self, *parts: jax.Array) -> jax.Array:
        """Joins parts of a stack for the iteration."""
        wide = np.promote_types(parts[0].dtype, jnp.float32)
        return jnp.concatenate([x.astype(wide) for x in parts])

    @functools.partial(jax.jit, static_argnums=0)
    def iterate(self, stack: jax.Array) -> jax.Array:
        """Orthogonalizes a prepared stack; the result is float32 or wider."""
        result = self.function(stack)
        if getattr(result, "shape", None) != stack.shape:
            raise ValueError(
                f"the orthogonalizer returned {shown(result)} for a stack of matrices "
                f"{stack.shape}: it has to return an array of the same shape"
            )
        return result.astype(stack.dtype)

    def wire_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Returns the dtype in which matrices of `dtype` are sent between devices."""
        return np.promote_types(dtype, jnp.float32)

    def cost(self, shape: tuple[int, ...], dtype: jnp.dtype) -> float:
        """Returns the multiplications for a matrix of `shape`, up to a factor."""
        m, n = sorted(shape)
        return float(m * m * n)

    def orthogonalize_all(
        self, stack: jax.Array, count: jax.Array | None = None
    ) -> jax.Array:
        """Orthogonalizes a stack in batches, in place.

        With a `count`, which may be traced, only the first `count` matrices; the others
        become anything.
        """
        slots, *shape = stack.shape
        step = self.batch_size(shape, slots)
        if count is None and slots <= step:
            return self.orthogonalize(stack).astype(stack.dtype)
        results = jnp.pad(stack, [(0, -slots % step), (0, 0), (0, 0)])

        def replace(i: Any, results: jax.Array) -> jax.Array:
            batch = jax.lax.dynamic_slice_in_dim(results, i * step, step)
            y = self.orthogonalize(batch).astype(stack.dtype)
            return jax.lax.dynamic_update_slice_in_dim(results, y, i * step, 0)

        trips = ((slots if count is None else count) + step - 1) // step
        return jax.lax.fori_loop(0, trips, replace, results)[:slots]

    def batch_size(
        self, shape: Sequence[int], count: int, in_blocks: bool = False
    ) -> int:
        """Returns how many of `count` matrices of a shape are iterated at once."""
        most = self.platform.batch_entries
        if in_blocks:
            most = min(most, self.platform.block_entries)
        size = max(1, int(most // max(1, math.prod(shape))))
        # Trips as even as can be, since padding in the last is iterated for nothing.
        return math.ceil(count / math.ceil(count / size)) if count else size


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Polynomials(Solver):
    """Orthogonalizes by Newton-Schulz, as the user set it up."""

    function: Any = dataclasses.field(default=None, init=False)
    schedule: Schedule
    method: str
    dtype: Any  # a dtype, or None for the platform's
    preconditioning: Preconditioning
    unstable_in: tuple[str, ...]  # dtypes in which the coefficients are

    commutes_with_transposition = True

    @functools.partial(jax.jit, static_argnums=0)
    def prepare(self, *parts: jax.Array) -> jax.Array:
        """Brings singular values into [0, 1], in the dtype of the iteration."""
        dtype = self.iteration_dtype(parts[0].dtype)
        x = precondition(parts, self.preconditioning, self.platform.sums_rows)
        if self._adds(x.shape, dtype):
            x = x * np.float32(sums_in_products.UNIT)
        return round_to(x, dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def iterate(self, stack: jax.Array) -> jax.Array:
        passes, is_gram = self._passes(stack.shape[-2:], stack.dtype)
        # The Gram form needs all bits of float32.
        precision = jax.lax.Precision.HIGHEST if is_gram else None
        block_rows, is_rolled = self.platform.block_rows, self.platform.is_rolled
        products = Products(stack.dtype, block_rows, precision, is_rolled)
        # A product with a batch axis of one is slower than one without.
        x = stack[0] if stack.ndim == 3 and len(stack) == 1 else stack
        if self._adds(stack.shape, stack.dtype):
            y = sums_in_products.iterate(x, passes, self.nth)
            return y.reshape(stack.shape)
        return iterate(x, passes, products).reshape(stack.shape)

    def wire_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype of the iteration, which rounds the same numbers, but for a norm.

        Not float16, where norms may overflow.
        """
        iterated = self.iteration_dtype(dtype)
        is_short = jnp.finfo(iterated).bits == 16
        return jnp.dtype(jnp.bfloat16) if is_short else iterated

    def cost(self, shape: tuple[int, ...], dtype: jnp.dtype) -> float:
        m, n = sorted(shape)
        return cost(m, n, self._passes(shape, self.iteration_dtype(dtype))[0])

    def iteration_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Returns the dtype to iterate matrices of `dtype` in."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return np.promote_types(self.dtype or dtype, jnp.complex64)
        if self.dtype is not None or dtype == jnp.float64:
            return self.dtype or dtype
        fast = self.platform.iteration_dtype
        return jnp.dtype("float32" if fast in self.unstable_in else fast)

    def _adds(self, shape: Sequence[int], dtype: jnp.dtype) -> bool:
        passes, _ = self._passes(shape[-2:], dtype)
        return self.platform.adds_in_products and sums_in_products.can_add(
            passes, dtype
        )

    def _passes(self, shape: Sequence[int], dtype: jnp.dtype) -> tuple[Passes, bool]:
        """Returns the passes, and whether they are the Gram form."""
        m, n = sorted(shape)
        # On an accelerator exact products of float32, which the Gram form needs, are
        # several times as slow as those of the standard form.
        cheap = self.platform.name == "cpu" or jnp.finfo(dtype).bits == 16
        is_gram = self.method == "gram" or (
            self.method == "auto" and cheap and n >= GRAM_ASPECT_RATIO * m
        )
        if is_gram:
            return collected(self.schedule, dtype.name), True
        return tuple((triple,) for triple in self.schedule), False

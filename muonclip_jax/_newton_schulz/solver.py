"""Newton-Schulz as the user set it up: prepares matrices, iterates, knows the cost."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from .._options import choice, float_dtype
from .coefficients import (
    check_schedule,
    find_unstable,
    resolve_schedule,
    Schedule,
    Triple,
)
from .platforms import Kernel, Platform, PLATFORMS
from .polar import METHODS, PolarMethod, Range, run_in_loop, take_turns
from .precondition import precondition, Preconditioning
from .products import round_to


Method = Literal["auto", "standard", "gram"]

#: From this aspect ratio on `method="auto"` takes the Gram form. In multiplications of
#: `m^3` a further step costs `2r + 1` in the standard form and 4 in the Gram form for
#: an aspect ratio `r`: the break-even is 1.5 for any number of steps. In two blocks it
#: is 1.29 on paper and was measured between 1.33 and 1.5.
GRAM_ASPECT_RATIO = 1.5


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

    A pytree, so that it goes through `jit` and `shard_map` like any argument: static
    but for a traced number of steps. Methods on arrays take and return `(..., m, n)`
    and are traced once for all leaves and stacks of a shape.
    """

    schedule: Schedule
    method: str
    dtype: jnp.dtype | None
    preconditioning: Preconditioning
    kernel: Kernel
    ns_steps: jax.Array | None = None  # only if traced
    platform: Platform | None = None  # None until it is known

    def on_its_platform(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function(solver, *arguments)` with the solver of the platform.

        That need not be the platform of the default backend, so only the compiler knows
        it: what follows is traced for each, as `jax.export` for several of them needs.
        """

        def branch(platform: Platform) -> Callable[..., Any]:
            return lambda solver, *arguments: function(
                dataclasses.replace(solver, platform=platform), *arguments
            )

        branches = {name: branch(platform) for name, platform in PLATFORMS.items()}
        return jax.lax.platform_dependent(self, *arguments, **branches)

    def on(self, platform: Platform) -> "Solver":
        return dataclasses.replace(self, platform=platform)

    @property
    def its_platform(self) -> Platform:
        assert self.platform is not None
        return self.platform

    def orthogonalize(self, *stacks: jax.Array) -> list[jax.Array]:
        return self.iterate(*map(self.prepare, stacks))

    @jax.jit
    def prepare(self, *parts: jax.Array) -> jax.Array:
        """Singular values in [0, 1], in the dtype of the iteration and its size.

        Of parts of a stack it makes one.
        """
        dtype = self.iteration_dtype(parts[0].dtype)
        y = precondition(parts, self.preconditioning, self.its_platform.norm)
        return round_to(y / Range.of(dtype).first_size, dtype)

    @jax.jit
    def iterate(self, *stacks: jax.Array) -> list[jax.Array]:
        """Runs all steps on what is prepared, stacks of matrices of one shape in turns.

        Results are not rounded to the dtype of the iteration where that costs nothing.
        """
        (m, n), dtype = sorted(stacks[0].shape[-2:]), stacks[0].dtype
        method = self.polar_method(m, n, dtype)
        platform, is_wide = self.its_platform, jnp.finfo(dtype).bits > 16

        def usual(*stacks: jax.Array) -> list[jax.Array]:
            products = platform.products(m, n, dtype, self.kernel, exact=method.exact)
            in_loop = platform.loops and is_wide
            # A product with a batch axis of one is slower than one without.
            matrices = [x[0] if x.ndim == 3 and len(x) == 1 else x for x in stacks]
            done = take_turns(
                [
                    method.run(x, self.schedule, products, in_loop=in_loop)
                    for x in matrices
                ]
            )
            return [y.reshape(x.shape) for y, x in zip(done, stacks, strict=True)]

        if self.ns_steps is None:
            return usual(*stacks)
        # A traced number of steps, as under `optax.inject_hyperparams`, is nearly
        # always that of the coefficients. It is asked at run time, so that it costs
        # nothing then, and any other runs in a loop.
        products = platform.products(m, n, dtype, "xla", exact=False)
        return jax.lax.cond(
            self.ns_steps == len(self.schedule),
            lambda steps, *stacks: usual(*stacks),
            lambda steps, *stacks: [
                run_in_loop(x, self.schedule, steps, products) for x in stacks
            ],
            self.ns_steps,
            *stacks,
        )

    def map(
        self,
        function: Callable[..., Sequence[jax.Array]],
        stack: jax.Array,
        count: jax.Array | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """Applies a function of matrices to as many of a stack at once as do well.

        - `function`: from stacks, which it may take in turns, to as many.
        - `count`: only the first ones, a number that may be known at run time alone;
            what becomes of the rest is undefined.
        - `dtype`: of the result, float32 or wider if None.

        Results take the places of what they were made of, so that there is one stack.
        """
        slots, *shape = stack.shape
        given, dtype = stack.dtype, dtype or np.promote_types(stack.dtype, jnp.float32)
        turns, size = self.its_platform.turns, self.batch_size(shape)
        if count is None and slots <= max(1, size // turns):
            return function(stack)[0].astype(dtype)
        step, rest_alone = self.trip(slots, shape, is_known=count is None)
        padding = 0 if rest_alone else -slots % step
        results = jnp.pad(stack.astype(dtype), [(0, padding), (0, 0), (0, 0)])

        def replace(start: Any, results: jax.Array, count: int) -> jax.Array:
            parts = np.array([len(x) for x in np.array_split(range(count), turns)])
            parts = parts[parts > 0]
            starts = [start + int(first) for first in np.cumsum(parts) - parts]
            batches = [
                jax.lax.dynamic_slice_in_dim(results, first, part).astype(given)
                for first, part in zip(starts, parts, strict=True)
            ]
            for first, y in zip(starts, function(*batches), strict=True):
                y = y.astype(dtype)
                results = jax.lax.dynamic_update_slice_in_dim(results, y, first, 0)
            return results

        def loop(start: Any, trips: Any, results: jax.Array, step: int) -> jax.Array:
            return jax.lax.fori_loop(
                0,
                trips,
                lambda i, results: replace(start + i * step, results, step),
                results,
            )

        wanted: Any = slots if count is None else count
        if not rest_alone:
            return loop(0, (wanted + step - 1) // step, results, step)[:slots]
        trips = wanted // step
        with jax.named_scope("in_turns"):
            results = loop(0, trips, results, step)
        return loop(trips * step, wanted - trips * step, results, 1)

    def trip(
        self, slots: int, shape: Sequence[int], *, is_known: bool
    ) -> tuple[int, bool]:
        """The matrices in a trip of the loop of `map`, and whether the last go alone.

        `is_known` is whether it is known when compiling how many of the slots count.
        """
        turns, size = self.its_platform.turns, self.batch_size(shape)
        # A batch for each turn. Where the count is not known that could be many more
        # than it, and a batch is cut into turns, unless it is a single matrix.
        step = min(slots, turns * size if is_known or size == 1 else size)
        if size == 1:
            return step, step > 1
        # Trips as even as they can be: what pads the last is iterated for nothing.
        return math.ceil(slots / math.ceil(slots / step)), False

    def batch_size(self, shape: Sequence[int]) -> int:
        """The matrices of a shape that are iterated at once where there are enough."""
        return max(1, self.its_platform.batch_entries // max(1, math.prod(shape)))

    def polar_method(self, m: int, n: int, dtype: jnp.dtype) -> PolarMethod:
        """The method for `(m, n)`, the short side first, iterated in a dtype."""
        if self.method != "auto":
            return METHODS[self.method]
        # The Gram form needs exact products. On an accelerator those of float32 are
        # several times as slow as what the standard form makes do with.
        is_short = jnp.finfo(dtype).bits == 16
        pays = self.its_platform.multiplies_exactly or is_short
        return METHODS["gram" if pays and n >= GRAM_ASPECT_RATIO * m else "standard"]

    def iteration_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype to iterate matrices of `dtype` in."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return np.promote_types(self.dtype or dtype, jnp.complex64)
        if self.dtype is not None or dtype == jnp.float64:
            return self.dtype or dtype
        fast = self.its_platform.iteration_dtype
        is_stable = find_unstable(self.schedule, fast) is None
        return jnp.dtype(fast if is_stable else "float32")

    def wire_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype in which matrices of `dtype` are sent between devices.

        Not float16: the matrices have no norm yet.
        """
        iterated = self.iteration_dtype(dtype)
        is_short = jnp.finfo(iterated).bits == 16
        return jnp.dtype(jnp.bfloat16) if is_short else iterated

    def cost(self, shape: tuple[int, ...], dtype: jnp.dtype) -> float:
        """The multiplications that a matrix of `shape` takes."""
        (m, n), dtype = sorted(shape), self.iteration_dtype(dtype)
        method = self.polar_method(m, n, dtype)
        return method.cost(m, n, self.schedule, dtype.name)


def make_solver(
    ns_coeffs: str | Triple | Schedule,
    ns_steps: int | jax.Array,
    method: Method,
    dtype: DTypeLike | None,
    preconditioning: Preconditioning,
    kernel: Kernel,
    *,
    prefix: str = "",
) -> Solver:
    """From what the user asked for; `prefix` is that of the arguments.

    **Raises:** `ValueError` for what cannot work.
    """
    choice(f"{prefix}method", method, ("auto", *METHODS))
    choice("preconditioning", preconditioning, get_args(Preconditioning))
    choice(f"{prefix}kernel", kernel, get_args(Kernel))
    schedule = resolve_schedule(ns_coeffs, ns_steps)
    iterated = float_dtype(f"{prefix}dtype", dtype)
    if iterated is not None:
        check_schedule(schedule, iterated.name)
    steps = ns_steps if isinstance(ns_steps, Tracer) else None
    return Solver(schedule, method, iterated, preconditioning, kernel, steps)

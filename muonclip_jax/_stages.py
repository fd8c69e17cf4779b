"""Newton-Schulz on one platform: prepare matrices, then iterate.

Both take and return `(..., m, n)` with the short side first, and are traced once for
all leaves and stacks of one shape.
"""

import functools

import jax

from ._iterations import gram, round_to, standard, traced
from ._options import Options
from ._preconditioning import precondition
from ._strategy import choose_strategy, iteration_dtype, Platform


_static = functools.partial(jax.jit, static_argnames=("options", "platform"))


@_static
def prepare(x: jax.Array, options: Options, platform: Platform) -> jax.Array:
    """Brings singular values into [0, 1], in the dtype of the iteration."""
    dtype = iteration_dtype(x.dtype, options, platform)
    return round_to(precondition(x, options.preconditioning), dtype)


@_static
def iterate(
    x: jax.Array, ns_steps: jax.Array | None, options: Options, platform: Platform
) -> jax.Array:
    """Runs all steps, or as many as a traced `ns_steps` says.

    Where it costs nothing the result is not rounded to the dtype of the iteration.
    """
    strategy = choose_strategy(x.shape[-2:], x.dtype, options.method, platform)
    if ns_steps is not None:
        return traced(x, options.schedule, strategy.blocks, ns_steps)
    form = gram if strategy.gram else standard
    return form(x, options.schedule, strategy.blocks)

"""Newton-Schulz on one platform: prepare matrices, then iterate.

Both take and return `(..., m, n)` with the short side first, and are traced once for
all leaves and stacks of one shape.
"""

import functools
from collections.abc import Callable

import jax

from .iterations import gram, standard, traced
from .options import Options
from .platforms import choose_strategy, iteration_dtype, Platform, Strategy
from .precondition import precondition
from .products import kernel_products, Products, round_to, xla_products


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
    strategy = choose_strategy(x.shape[-2:], x.dtype, options, platform)
    if ns_steps is not None:
        products = xla_products(x.dtype, exact=False)
        return traced(x, options.schedule, products, strategy.blocks, ns_steps)
    form = gram if strategy.gram else standard
    products = _products(strategy, x.dtype, platform)
    return form(x, options.schedule, products, strategy.blocks)


def _products(strategy: Strategy, dtype, platform: Platform) -> Products:
    if strategy.kernel:
        return kernel_products(_kernel(platform), dtype)
    # The Gram form squares the spectrum, and so needs all the bits there are.
    return xla_products(dtype, exact=strategy.gram)


def _kernel(platform: Platform) -> Callable[..., jax.Array]:
    # Pallas is slow to import, and most programs never ask for it.
    if platform == "tpu":
        from .kernels.tpu import symmetric_product
    else:
        from .kernels.gpu import symmetric_product
    return symmetric_product

"""The Newton-Schulz iteration, in passes that each start from R = X X^T.

With one step a pass it is the standard form, with several the Gram form. It takes
`(..., m, n)` with the short side first and iterates in its dtype. `blocks` is the
number of row blocks that Hermitian products are computed in; like the products
themselves it changes the cost and, but for rounding, not the result.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from .coefficients import Schedule
from .gram_factor import factor_of
from .hermitian_blocks import join, Rows, split
from .products import Products, round_to, widen
from .steps import growth_of, range_of, Step
from .turns import Iteration
from .waiting import wait_for


def iterate(
    x: jax.Array,
    passes: Sequence[Schedule],
    products: Products,
    blocks: int,
    halfway: jax.Array | None = None,
) -> Iteration:
    """Returns the result, not rounded. Later passes wait for the zero `halfway`."""
    rows, bounds = split(x, blocks), range_of(x.dtype)
    size: Any = bounds.first_size
    most = bounds.first_size  # that the size can be
    for i, schedule in enumerate(passes):
        steps = [Step.of(triple) for triple in schedule]
        underflows = (most * growth_of(steps[:-1])) ** 2 > bounds.unit
        if i and (products.resizes or underflows):
            rows = _resized(rows, size / bounds.size)
            size = most = bounds.size
        rows = round_to(rows, x.dtype)
        if halfway is not None and i == math.ceil(len(passes) / 2):
            rows = jax.tree.map(functools.partial(wait_for, halfway), rows)
        rows = yield rows
        rows, growth = yield from _pass(rows, size, most, steps, products)
        size, most = size * growth, most * growth_of(steps)
    return join(_resized(rows, size)).reshape(x.shape)


def _pass(
    rows: Rows, size: Any, most: float, steps: Sequence[Step], products: Products
) -> Iteration:
    """Returns what is stored of X afterwards, and by how much its size has grown."""
    r = yield products.gram(rows)
    factor = yield from factor_of(r, size**2, most**2, steps, products)
    return products.apply(factor.q, rows, factor.keep), factor.growth


def _resized(rows: Rows, factor: Any) -> Rows:
    return jax.tree.map(lambda x: factor * widen(x), rows)

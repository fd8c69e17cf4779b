"""What the steps of a pass do to X, gathered on the smaller R = X X^T."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .hermitian_blocks import add_to_diagonal, Hermitian
from .products import Products, round_to
from .steps import range_of, Step
from .turns import Iteration


class Factor(NamedTuple):
    """`growth (q + keep I)`, for each matrix of a batch.

    Multiples of the identity are kept apart, since rounded with the rest they would
    drown it: the slopes of the steps, and the mean of the diagonal of the product.
    """

    q: Hermitian
    keep: Any
    growth: Any

    def times(self, step: Step, z: Hermitian, products: Products) -> "Factor":
        """The factor times `growth (z + keep I)`, as the step has them."""
        # Of (q + keep I) (z + keep' I) all but `keep keep' I` is in p and z.
        p = products.combine(self.q, z, self.q, step.keep, rounded=False)
        total, mean = products.sum_and_mean(p, z, self.keep)
        growth = _not_zero(self.keep * step.keep + mean)
        q = jax.tree.map(lambda x: x / growth, add_to_diagonal(total, -mean))
        q = round_to(q, z[0][0].dtype)
        return Factor(q, 1.0, self.growth * step.growth * growth)


def factor_of(
    r: Hermitian, unit: Any, most: float, steps: Sequence[Step], products: Products
) -> Iteration:
    """What the steps owe to an X with `X X^T = unit r`; the unit is at most `most`.

    Returns a `Factor`.
    """
    factor, bounds = None, range_of(r[0][0].dtype)
    for i, step in enumerate(steps):
        underflows = most > bounds.unit_of_square
        z = yield products.polynomial(r, *step.polynomial(unit), widened=underflows)
        if factor is None:
            factor = Factor(z, step.keep, step.growth)
        else:
            factor = factor.times(step, z, products)
            factor = factor._replace(q=(yield factor.q))
        if i < len(steps) - 1:
            rz = yield products.combine(r, z, r, step.keep)
            r = yield products.combine(z, rz, rz, step.keep)
            unit, most = unit * step.growth**2, most * step.growth**2
    assert factor is not None
    return factor


def _not_zero(growth):
    """The mean of a factor is 0 only for a matrix of zeros, and with a slope of 0."""
    return jnp.where(growth == 0, 1, growth)

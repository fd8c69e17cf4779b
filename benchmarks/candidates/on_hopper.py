"""Newton-Schulz by kernels for Hopper that compute half of what is symmetric.

    mc.muon(0.02, orthogonalizer=OnHopper())

Compiled and interpreted; it has not run. It takes matrices whose rows and columns are
multiples of 8, and pays, if it does, from 2,048 rows on, where a matrix alone has a
tile of 128 x 128 above its diagonal for every multiprocessor of an H100.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from internals import collected, Schedule

import muonclip_jax as mc

from . import hopper


@dataclasses.dataclass(frozen=True)
class OnHopper:
    """The Gram form in float16: every product but two a pass is a kernel's."""

    schedule: Schedule = mc.NS_COEFFS["keller"]
    settings: tuple[tuple[str, Any], ...] = ()  # of `hopper.symmetric_product`

    def orthogonalize(self, x: jax.Array) -> jax.Array:
        if x.ndim == 2 or x.shape[-2] > x.shape[-1]:
            y = self.orthogonalize(x[None] if x.ndim == 2 else x.mT)
            return y[0] if x.ndim == 2 else y.mT
        norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
        y = jnp.where(norm > 0, x / norm, 0)
        for steps in collected(self.schedule, "float16"):
            y = self._one_pass(y.astype(jnp.float16), steps)
        return y.astype(x.dtype)

    def _one_pass(self, x: jax.Array, steps: Schedule) -> jax.Array:
        """As `muonclip_jax`'s, with what is added to a product added by its kernel."""
        product = functools.partial(hopper.symmetric_product, **dict(self.settings))
        r, q, keep = product(x, x), None, 1.0
        for i, (a, b, c) in enumerate(steps):
            z = product(r, r, addend=r, scale=c, shift=b)
            if q is None:
                q, keep = z, a
            else:
                rest = (a * q.astype(jnp.float32) + keep * z).astype(x.dtype)
                q, keep = product(q, z, addend=rest, shift=1.0), keep * a
            if i < len(steps) - 1:
                rz = product(r, z, addend=r, shift=a)
                r = product(z, rz, addend=rz, shift=a)
        assert q is not None
        return jnp.matmul(q, x, preferred_element_type=jnp.float32) + keep * x

"""The two forms of the Newton-Schulz iteration, and the products they are made of."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._coefficients import Schedule


class Products(NamedTuple):
    """How to multiply: in general, and where the result is known to be Hermitian."""

    general: Callable[[jax.Array, jax.Array], jax.Array]
    hermitian: Callable[[jax.Array, jax.Array], jax.Array]


def products(halves: bool, precision=None) -> Products:
    """Products that accumulate in float32 or better.

    `halves` leaves out a quarter of each Hermitian product: the block above the
    diagonal is copied from the one below.
    """
    general = functools.partial(_matmul, precision=precision)
    hermitian = functools.partial(_in_halves, general) if halves else general
    return Products(general, hermitian)


def standard(x: jax.Array, schedule: Schedule, products: Products) -> jax.Array:
    return functools.reduce(functools.partial(_step, products), schedule, x)


def traced(
    x: jax.Array, schedule: Schedule, ns_steps: jax.Array, products: Products
) -> jax.Array:
    """The standard form for a number of steps known only when it runs."""
    triples = jnp.asarray(schedule, dtype=jnp.float32)
    last = len(schedule) - 1

    def body(i, y):
        return _step(products, y, triples[jnp.minimum(i, last)])

    return jax.lax.fori_loop(0, ns_steps, body, x)


def _step(products: Products, x: jax.Array, triple) -> jax.Array:
    """One step; sums and coefficients stay float32, products round to `x.dtype`."""
    a, b, c = triple
    gram = products.hermitian(x, _adjoint(x))
    rounded = gram.astype(x.dtype)
    square = products.hermitian(rounded, rounded)
    polynomial = (b * gram + c * square).astype(x.dtype)
    return (a * x + products.general(polynomial, x)).astype(x.dtype)


def gram(x: jax.Array, schedule: Schedule, products: Products) -> jax.Array:
    # In exact arithmetic one pass would do. In float32 the error of R grows with
    # the condition number of Q, so long schedules start afresh every five steps.
    for first in range(0, len(schedule), 5):
        x = _gram_pass(x, schedule[first : first + 5], products)
    return x


def _gram_pass(x: jax.Array, schedule: Schedule, products: Products) -> jax.Array:
    """Runs all steps on R = X X^T, gathering in Q the factor that X owes."""
    general, hermitian = products
    r = hermitian(x, _adjoint(x))
    identity = jnp.eye(r.shape[-1], dtype=r.dtype)
    q = None
    for a, b, c in schedule:
        # a*I stays implicit: adding it to Z would drown the small entries of Z.
        z = c * hermitian(r, r) + b * r
        q = z + a * identity if q is None else hermitian(q, z) + a * q
        rz = hermitian(r, z) + a * r
        r = hermitian(z, rz) + a * rz
    return x if q is None else general(q, x)


def _in_halves(multiply, x: jax.Array, y: jax.Array) -> jax.Array:
    half = x.shape[-2] // 2
    top = multiply(x[..., :half, :], y[..., :, :half])
    bottom = multiply(x[..., half:, :], y)
    corner = _adjoint(bottom[..., :, :half])
    return jnp.concatenate([jnp.concatenate([top, corner], -1), bottom], -2)


def _matmul(x: jax.Array, y: jax.Array, precision=None) -> jax.Array:
    accumulator = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, y, precision=precision, preferred_element_type=accumulator)


def _adjoint(x: jax.Array) -> jax.Array:
    return x.mT.conj() if jnp.iscomplexobj(x) else x.mT

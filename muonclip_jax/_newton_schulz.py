"""Newton-Schulz: a matrix in, its nearest (semi-)orthogonal matrix out."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from ._chunks import map_chunks
from ._coefficients import check_schedule, resolve_schedule, Schedule, Triple
from ._iterations import gram, standard, traced
from ._strategy import choose_strategy, Method


def newton_schulz(
    x: jax.Array,
    *,
    ns_coeffs: str | Triple | Schedule = "keller",
    ns_steps: int | jax.Array = 5,
    method: Method = "auto",
    dtype: DTypeLike | None = None,
) -> jax.Array:
    r"""Orthogonalizes a matrix, or every matrix of a stack.

    After division by the Frobenius norm each step maps the singular values of
    $X = U S V^T$ by an odd polynomial and leaves $U$ and $V$ alone:

    $$X \leftarrow a X + (b A + c A^2) X, \qquad A = X X^T$$

    so that $X$ tends to the polar factor $U V^T$. The result does not depend on the
    scale of `x`, from the smallest normal float32 to the largest; a zero matrix
    stays zero.

    **Arguments:**

    - `x`: array of shape `(..., m, n)`, any real or complex float dtype.
    - `ns_coeffs`: a preset of [`NS_COEFFS`][], one triple `(a, b, c)` repeated
        `ns_steps` times, or a tuple of `ns_steps` triples.
    - `ns_steps`: how many steps.
    - `method`: `"standard"` iterates on `x`. `"gram"` iterates on the smaller
        $X X^T$ and multiplies `x` once at the end: less arithmetic for matrices far
        from square; it squares the spectrum, so it always runs in float32. `"auto"`
        is `"gram"` on CPU in float32 or wider from an aspect ratio of 1.5 on, and
        `"standard"` elsewhere. A traced `ns_steps` runs as `"standard"`.
    - `dtype`: dtype of the iteration, that of `x` by default. Norms, products and
        coefficients are float32 all the same.

    **Returns:** an array of the shape and dtype of `x`.

    **Raises:** `ValueError` for unknown or unstable coefficients, for a number of
    coefficients that contradicts `ns_steps`, for an unknown method, and for an `x`
    that is not a stack of floating-point matrices.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> x = jnp.diag(jnp.array([3.0, 0.5]))
        >>> y = mc.newton_schulz(x, ns_coeffs="deepseek_v4", ns_steps=10)
        >>> bool(jnp.allclose(y, jnp.eye(2), atol=1e-3))
        True

    ??? cite "References"

        Keller Jordan et al., "Muon: An optimizer for hidden layers in neural
        networks", 2024, kellerjordan.github.io/posts/muon. Gram form: Dao AI Lab,
        "Gram Newton-Schulz", 2026.
    """
    if method not in ("auto", "standard", "gram"):
        raise ValueError(
            f"unknown method {method!r}; choose 'auto', 'standard' or 'gram'"
        )
    x = jnp.asarray(x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            "newton_schulz needs floating-point matrices (..., m, n), got shape "
            f"{x.shape} and dtype {x.dtype}"
        )
    schedule = resolve_schedule(ns_coeffs, ns_steps)
    compute_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if jnp.iscomplexobj(x):
        compute_dtype = jnp.promote_types(compute_dtype, jnp.complex64)
    check_schedule(schedule, jnp.finfo(compute_dtype).dtype.name)
    traced_steps = ns_steps if isinstance(ns_steps, Tracer) else None
    return _iterate(
        x,
        traced_steps,
        schedule=schedule,
        method=method if traced_steps is None else "standard",
        dtype=compute_dtype,
    )


@functools.partial(jax.jit, static_argnames=("schedule", "method", "dtype"))
def _iterate(x, traced_steps, *, schedule, method, dtype):
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    run = functools.partial(_run, schedule=schedule, method=method, dtype=dtype)
    # The platform a program is compiled for need not be the default backend.
    y = jax.lax.platform_dependent(
        wide,
        traced_steps,
        cpu=functools.partial(run, platform="cpu"),
        default=functools.partial(run, platform="accelerator"),
    )
    return y if wide.shape == x.shape else y.mT


def _run(x, traced_steps, *, schedule, method, dtype, platform):
    strategy = choose_strategy(x.shape[-2:], dtype, method, platform)
    function = functools.partial(
        _orthogonalize,
        traced_steps=traced_steps,
        schedule=schedule,
        dtype=dtype,
        strategy=strategy,
    )
    if x.ndim == 2:
        return function(x)
    stack = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return map_chunks(function, stack, strategy.chunk_bytes).reshape(x.shape)


def _orthogonalize(x, *, traced_steps, schedule, dtype, strategy):
    """Orthogonalizes `(..., m, n)`, the short side first."""
    y = _divide_by_norm(x)
    if strategy.gram:
        y = gram(y, schedule, strategy.blocks)
    elif traced_steps is None:
        y = standard(y.astype(dtype), schedule, strategy.blocks)
    else:
        y = traced(y.astype(dtype), schedule, strategy.blocks, traced_steps)
    return y.astype(x.dtype)


def _divide_by_norm(x):
    """Divides by the Frobenius norm, in float32 or better."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # The square of 1e-30 or 1e30 leaves float32, so the largest entry goes first;
    # the norm is then at least 1 unless the matrix is zero.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    # Compilers divide by multiplying with the reciprocal, which for the largest
    # numbers would be subnormal and flushed to zero.
    shrink = jnp.where(largest > 1, 2.0**-8, 1).astype(largest.dtype)
    divisor = jnp.where(largest < jnp.finfo(x.dtype).tiny, 1, largest * shrink)
    x = (x * shrink) / divisor
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    return x / jnp.maximum(norm, 1)

"""Newton-Schulz: a matrix in, its nearest (semi-)orthogonal matrix out."""

import math

import jax
from jax.typing import DTypeLike

from .._axes import on_whole_matrices
from .._options import array, is_float
from .coefficients import Schedule, Triple
from .platforms import Kernel
from .precondition import Preconditioning
from .solver import make_solver, Method, Solver


def newton_schulz(
    x: jax.Array,
    *,
    ns_coeffs: str | Triple | Schedule = "keller",
    ns_steps: int | jax.Array = 5,
    method: Method = "auto",
    dtype: DTypeLike | None = None,
    preconditioning: Preconditioning = "frobenius",
    kernel: Kernel = "xla",
) -> jax.Array:
    r"""Orthogonalizes a matrix, or every matrix of a stack.

    After division by the Frobenius norm each step maps the singular values of
    $X = U S V^T$ by an odd polynomial and leaves $U$ and $V$ alone:

    $$X \leftarrow a X + (b A + c A^2) X, \qquad A = X X^T$$

    so that $X$ tends to the polar factor $U V^T$. The result does not depend on the
    scale of `x`, from the smallest normal float32 to the largest; a zero matrix
    stays zero. The same holds for the gradient; that of a zero matrix is zero.

    **Arguments:**

    - `x`: array of shape `(..., m, n)`, any real or complex float dtype.
    - `ns_coeffs`: a preset of [`NS_COEFFS`][], one triple `(a, b, c)` repeated
        `ns_steps` times, or a tuple of `ns_steps` triples.
    - `ns_steps`: how many steps. A traced number, as under
        `optax.inject_hyperparams`, costs nothing where it comes out as the number of
        coefficients (5 of a single triple); any other runs as `"standard"`, by XLA's
        products.
    - `method`: `"standard"` iterates on `x`. `"gram"` iterates on the smaller
        $X X^T$ and multiplies `x` once or a few times: less arithmetic for matrices
        far from square. `"auto"` is `"gram"` from an aspect ratio of 1.5 on, but
        `"standard"` on GPU and TPU where the iteration is in float32 or wider.
    - `dtype`: dtype of the iteration. By default float32 on CPU, float16 on GPU and
        bfloat16 on TPU, float64 for an `x` of float64, complex64 for a complex one,
        and float32 where coefficients would be unstable in less. With
        `dtype="float32"` accelerators are slower and 10 to 100 times as accurate:
        `"standard"` then multiplies at JAX's default precision, and `"gram"`, if
        asked for, at the highest. Norms and coefficients are float32 or wider; so are
        sums, but for GPUs in float16, which add to a product before they round it.
    - `preconditioning`: `"frobenius"`, or `"aol"`, which divides row $i$ (column, if
        there are fewer) by $\sqrt{\sum_j |X X^T|_{ij}}$. That brings singular values
        near 1 at once, so that the four steps of `"turbo_muon"` do, but the result is
        no longer the polar factor of `x` itself. `"equilibrated"` gives all rows one
        norm and then all columns (MuonEq evens out rows): the polar factor of that.
    - `kernel`: `"xla"` for products by XLA and its libraries, `"pallas"` for kernels
        of this package, which compute half of those known to be symmetric: on Hopper
        (JAX 0.10 or newer) in float16 from 2,048 rows on, if rows and columns are
        multiples of 8. What has no kernel is XLA's. `"auto"` takes them where they fill
        their tiles: for rows that are a multiple of 128. They have been compiled and
        interpreted, and have not run.

    **Returns:** an array of the shape and dtype of `x`.

    **Raises:** `ValueError` for unknown or unstable coefficients, for a number of
    coefficients that contradicts `ns_steps`, for an unknown method, preconditioning or
    kernel, and for an `x` that is not a stack of floating-point matrices.

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
    solver = make_solver(ns_coeffs, ns_steps, method, dtype, preconditioning, kernel)
    x = array("x", x)
    if x.ndim < 2 or not is_float(x.dtype):
        raise ValueError(
            "newton_schulz needs floating-point matrices (..., m, n), got shape "
            f"{x.shape} and dtype {x.dtype}"
        )
    return on_whole_matrices(_newton_schulz, solver, x)


@jax.jit
def _newton_schulz(solver: Solver, x: jax.Array) -> jax.Array:
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    stack = wide.reshape(math.prod(wide.shape[:-2]), *wide.shape[-2:])
    y = solver.on_its_platform(_orthogonalize, stack).reshape(wide.shape)
    return y if wide.shape == x.shape else y.mT


def _orthogonalize(solver: Solver, stack: jax.Array) -> jax.Array:
    return solver.map(solver.orthogonalize, stack, dtype=stack.dtype)

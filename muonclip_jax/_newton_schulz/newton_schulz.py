"""Newton-Schulz as users ask for it: a function, a value, and others in its place."""

from __future__ import annotations  # help() shows aliases by name

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast, get_args, Literal, Protocol

import jax

from .._mesh_axes import on_whole_matrices
from .._options import (
    check_array,
    check_choice,
    check_float_dtype,
    check_whole_number,
    FloatDType,
    is_float,
    shown,
)
from .coefficients import (
    as_tuples,
    check_schedule,
    find_unstable,
    NS_COEFFS,
    Preset,
    resolve_schedule,
    Schedule,
    Triple,
)
from .iteration import Preconditioning
from .solver import Polynomials, Solver


Method = Literal["auto", "standard", "gram"]


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """Newton-Schulz with its settings, as a value: an `orthogonalizer` of [`muon`][].

    **Arguments:** as for [`newton_schulz`][].

    !!! example

        >>> import muonclip_jax as mc
        >>> tx = mc.muon(0.02, orthogonalizer=mc.NewtonSchulz("polar_express_6"))
        >>> mc.NewtonSchulz("keller", steps=3) == mc.NewtonSchulz("keller", steps=3)
        True
    """

    # No `__call__`: `optax.inject_hyperparams` treats what is callable as a schedule.
    coeffs: Preset | Triple | Schedule = "keller"
    _: dataclasses.KW_ONLY
    steps: int | None = None
    method: Method = "auto"
    dtype: FloatDType | None = None
    preconditioning: Preconditioning = "frobenius"

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(Method))
        check_choice("preconditioning", self.preconditioning, get_args(Preconditioning))
        steps = self.steps
        steps = None if steps is None else check_whole_number("steps", steps, 1)
        schedule = resolve_schedule(self.coeffs, steps)
        dtype = check_float_dtype("dtype", self.dtype)
        if dtype is not None:
            check_schedule(schedule, dtype.name)
        coeffs, steps = as_tuples(self.coeffs, steps)
        for name, value in dict(coeffs=coeffs, steps=steps, dtype=dtype).items():
            object.__setattr__(self, name, value)

    def orthogonalize(self, x: jax.Array) -> jax.Array:
        """Orthogonalizes a stack `(..., m, n)`: [`newton_schulz`][]."""
        x = check_array("x", x)
        if x.ndim < 2 or not is_float(x.dtype):
            raise ValueError(
                "newton_schulz needs floating-point matrices (..., m, n), got shape "
                f"{x.shape} and dtype {x.dtype}"
            )
        return on_whole_matrices(_newton_schulz, make_solver(self), x)


class Orthogonalizes(Protocol):
    """An object that orthogonalizes, as `NewtonSchulz` does."""

    def orthogonalize(self, x: jax.Array, /) -> jax.Array: ...


#: As users give it: a name of `NS_COEFFS`, an object or a function.
Orthogonalizer = Preset | Orthogonalizes | Callable[[jax.Array], jax.Array]


def make_solver(orthogonalizer: Orthogonalizer) -> Solver:
    """Returns the solver for an orthogonalizer as the user gave it.

    **Raises:** `ValueError` for what is no orthogonalizer.
    """
    if isinstance(orthogonalizer, str) and orthogonalizer in NS_COEFFS:
        orthogonalizer = NewtonSchulz(cast(Preset, orthogonalizer))
    if isinstance(orthogonalizer, NewtonSchulz):
        chosen = orthogonalizer
        schedule = resolve_schedule(chosen.coeffs, chosen.steps)
        short = ("float16", "bfloat16")
        unstable_in = tuple(x for x in short if find_unstable(schedule, x))
        return Polynomials(
            schedule, chosen.method, chosen.dtype, chosen.preconditioning, unstable_in
        )
    function: Any = getattr(orthogonalizer, "orthogonalize", orthogonalizer)
    if isinstance(orthogonalizer, type) or not callable(function):
        hint = (
            "; optax.inject_hyperparams calls functions as schedules: give it "
            "static_args=('orthogonalizer',)"
        ) * hasattr(orthogonalizer, "shape")
        raise ValueError(
            f"orthogonalizer must be one of {sorted(NS_COEFFS)}, mc.NewtonSchulz(...), "
            "or a function or an object with orthogonalize(x) from (..., m, n) to the "
            f"same shape; got {shown(orthogonalizer)}{hint}"
        )
    try:
        hash(function)
    except TypeError:
        # Such as a dataclass with `__call__`. `jit` finds programs by the solver, which
        # needs a hash; a partial has one, by identity.
        function = functools.partial(function)
    return Solver(function)


def newton_schulz(
    x: jax.Array,
    coeffs: Preset | Triple | Schedule = "keller",
    *,
    steps: int | None = None,
    method: Method = "auto",
    dtype: FloatDType | None = None,
    preconditioning: Preconditioning = "frobenius",
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
    - `coeffs`: a preset of [`NS_COEFFS`][], one triple `(a, b, c)` for all steps, or a
        tuple of triples. A step with a `c` of 0 needs no square.
    - `steps`: how many; `None` means all that the coefficients have, 5 for one triple.
    - `method`: `"standard"` iterates on `x`. `"gram"` iterates on the smaller $X X^T$
        and multiplies `x` once or a few times: less arithmetic for matrices far from
        square. `"auto"` is `"gram"` for aspect ratios of 1.5 or more, but `"standard"`
        on GPU and TPU if the iteration is in float32 or wider.
    - `dtype`: dtype of the iteration. By default float32 on CPU, float16 on GPU and
        bfloat16 on TPU, float64 for an `x` of float64, complex64 for a complex one, and
        float32 if coefficients would be unstable in half precision. With
        `dtype="float32"` accelerators are slower and 10 to 100 times as accurate:
        `"standard"` then multiplies at JAX's default precision, and `method="gram"` at
        the highest. Norms are float32 or wider, and so are coefficients and sums, but
        in float16 on GPU: there cuBLAS rounds a product once, with what is added to it.
    - `preconditioning`: `"frobenius"`, or `"aol"`, which divides row $i$ (column, if
        there are fewer) by $\sqrt{\sum_j |X X^T|_{ij}}$. This brings singular values
        near 1 at once, so that the four steps of `"turbo_muon"` are enough, but the
        result is not the polar factor of `x` itself. `"equilibrated"` first gives all
        rows one norm, then all columns (MuonEq: only rows); the result is the polar
        factor of that matrix.

    **Returns:** an array of the shape and dtype of `x`.

    **Raises:** `ValueError` for unknown or unstable coefficients, for more `steps` than
    they have, for an unknown method or preconditioning, and for an `x` that is not a
    stack of floating-point matrices.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> x = jnp.diag(jnp.array([3.0, 0.5]))
        >>> y = mc.newton_schulz(x, "deepseek_v4")
        >>> bool(jnp.allclose(y, jnp.eye(2), atol=1e-3))
        True

    ??? cite "References"

        Keller Jordan et al., "Muon: An optimizer for hidden layers in neural
        networks", 2024, kellerjordan.github.io/posts/muon. Gram form: Dao AI Lab,
        "Gram Newton-Schulz", 2026.
    """
    value = NewtonSchulz(
        coeffs, steps=steps, method=method, dtype=dtype, preconditioning=preconditioning
    )
    return value.orthogonalize(x)


@jax.jit
def _newton_schulz(solver: Solver, x: jax.Array) -> jax.Array:
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    stack = wide.reshape(math.prod(wide.shape[:-2]), *wide.shape[-2:])
    y = solver.on_its_platform(Solver.orthogonalize_all, stack).reshape(wide.shape)
    return y if wide.shape == x.shape else y.mT

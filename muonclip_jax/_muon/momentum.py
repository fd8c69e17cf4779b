"""Gradients to momentum: what is kept of them, and what is orthogonalized."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from .._axes import explicit_spec, on_automatic_axes
from .._layout.layout import cut_axes
from .._layout.state import StatePart, zero_parts, zeros_like
from .._matrices.stacks import MatrixView
from .._options import begins, flag, float_dtype, is_float, number, SHARE
from .._parameters import paths
from . import eight_bits
from .leaves import Leaves


class ScaleByMuonState(NamedTuple):
    """State of [`scale_by_muon`][]: the momentum.

    - `mu`: like the params, in `mu_dtype`; the sum `M = beta*M + G`, in float16 `M/32`,
        which does not overflow for a `beta` up to 0.96; in 8 bits, int8 codes.
    - `scales`: in 8 bits what decodes them, by the path of the leaf, else `None`.
    - `count`: the number of steps, for a `beta` that is a schedule. It is kept for
        every `beta`, so that a run can continue with another.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.scale_by_muon().init({"w": jnp.ones((1, 2))}).mu
        {'w': Array([[0., 0.]], dtype=float32)}
    """

    mu: optax.Updates
    scales: dict[str, eight_bits.Scales] | None = None
    count: Any = None


#: In float16, which ends at 65,504, momentum is stored divided by this: gradients
#: of size g add up to at most g / (1 - beta), 20 g with the usual 0.95. So momentum is
#: finite where gradients in float16 are for every beta up to 1 - 1/32. The least power
#: of two that is enough, since below 6e-5 float16 rounds to multiples of 6e-8.
FLOAT16_UNIT = 32

_COMPLEX = "mu_dtype='int8' is for real matrices, but {} are complex; use mu_dtype=None"
_NO_FLOATS = (
    "{} are no floats of 16 bits or more. Give a mu_dtype, such as 'bfloat16', or keep "
    "what is not trained out of the params"
)


class Momentum(NamedTuple):
    """A way to keep momentum: an init/update pair whose update returns leaves."""

    init: Callable[[optax.Params, Leaves], ScaleByMuonState]
    # state, leaves, views, gradients -> momentum to orthogonalize, state
    update: Callable[..., tuple[list[jax.Array], ScaleByMuonState]]


#: A number, or a function from the count of steps to one.
Beta = ArrayLike | Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Rise:
    """`optax.linear_schedule` as a value, which signatures show without an address."""

    start: float
    end: float
    steps: int

    def __call__(self, count: Any) -> Any:
        return optax.linear_schedule(self.start, self.end, self.steps)(count)

    def __repr__(self) -> str:
        return f"rising from {self.start} to {self.end} over {self.steps} steps"


#: The default, as in modded-nanogpt: a long memory holds back the first steps, whose
#: gradients turn fast, and pays once they no longer do. What it gains over 0.95:
#: benchmarks/evidence/experiments.md, "Defaults" and "Momentum by length".
RISING_BETA = Rise(0.85, 0.95, 300)


def momentum_in(dtype: DTypeLike | None, beta: Beta, nesterov: bool) -> Momentum:
    """Momentum of a dtype, the params' if it is `None`.

    **Raises:** `ValueError` for one that is neither a float nor int8, for a beta
    outside [0, 1], and for a `nesterov` that is no bool.
    """
    number("beta", beta, SHARE, "a schedule")
    nesterov = flag("nesterov", nesterov)
    dtype = float_dtype("mu_dtype", dtype, also="int8")
    kept = _in_8_bits(nesterov) if is_8_bits(dtype) else _in_floats(dtype, nesterov)

    def init(params: optax.Params, leaves: Leaves) -> ScaleByMuonState:
        if callable(beta):
            begins("beta", beta(np.int32(0)), SHARE)
        # Counted for every beta, so that a run can go on with a schedule.
        return kept.init(params, leaves)._replace(count=jnp.zeros((), jnp.int32))

    def update(state: ScaleByMuonState, *arguments):
        now: Any = beta(state.count) if callable(beta) else beta
        if not isinstance(beta, float | int):
            # A schedule's may be out of range, or NaN: a sum that grows, or is lost.
            now = jnp.where(now > 0, jnp.minimum(now, 1), 0)
        ahead, after = kept.update(now, state, *arguments)
        return ahead, after._replace(count=optax.safe_increment(state.count))

    return Momentum(init, update)


def is_8_bits(dtype: DTypeLike | None) -> bool:
    return dtype is not None and jnp.dtype(dtype) == jnp.int8


def _in_floats(dtype: DTypeLike | None, nesterov: bool) -> Momentum:
    def init(params: optax.Params, leaves: Leaves) -> ScaleByMuonState:
        if dtype is None:
            _refuse(leaves, lambda x: not is_float(x.dtype), _NO_FLOATS)
        mu = zeros_like(params, leaves.layout, dtype)
        return ScaleByMuonState(mu)

    def update(beta, state, leaves, views, gradients):
        pairs = [
            _accumulate(beta, m, g, nesterov) if view else (m, g)
            for m, g, view in zip(
                leaves.tree.of(state.mu), gradients, views, strict=True
            )
        ]
        mu = leaves.tree.unflatten(kept for kept, _ in pairs)
        return [ahead for _, ahead in pairs], ScaleByMuonState(mu)

    return Momentum(init, update)


def _in_8_bits(nesterov: bool) -> Momentum:
    def init(params: optax.Params, leaves: Leaves) -> ScaleByMuonState:
        _refuse(leaves, jnp.iscomplexobj, _COMPLEX)
        _check_whole(leaves)
        mu = zeros_like(params, leaves.layout, jnp.int8)
        return ScaleByMuonState(mu, _zero_scales(params, leaves))

    def update(beta, state, leaves, views, gradients):
        _check_whole(leaves)
        # Scales are by path, since leaves without a matrix have none.
        codes, momentum = leaves.tree.of(state.mu), list(gradients)
        scales: dict[str, eight_bits.Scales] = {}
        for i, view in enumerate(views):
            if view is None:
                continue
            name = paths.show(leaves.tree.paths[i])
            coded = codes[i], state.scales[name]
            codes[i], scales[name], momentum[i] = _accumulate_in_8_bits(
                beta, *coded, gradients[i], nesterov, view
            )
        mu = leaves.tree.unflatten(codes)
        return momentum, ScaleByMuonState(mu, leaves.by_path(scales))

    return Momentum(init, update)


def _zero_scales(params: optax.Params, leaves: Leaves) -> dict[str, eight_bits.Scales]:
    layouts = {
        i: eight_bits.parts_of_scales(view)
        for i, view in enumerate(leaves.views)
        if view and math.prod(view.shape)
    }
    entries, treedef = jax.tree_util.tree_flatten_with_path(
        layouts, lambda x: isinstance(x, StatePart)
    )
    zeros = zero_parts(params, leaves.layout, [(keys[0].key, x) for keys, x in entries])
    scales = treedef.unflatten(zeros)
    return leaves.by_path(
        {paths.show(leaves.tree.paths[i]): of for i, of in scales.items()}
    )


def _refuse(leaves: Leaves, is_of: Callable[[Any], bool], problem: str) -> None:
    """Raises for matrices of a dtype in which momentum cannot be kept."""
    if found := leaves.where(lambda x, view: view and is_of(x)):
        raise ValueError(problem.format(paths.show_all(found)))


def _check_whole(leaves: Leaves) -> None:
    cuts = zip(leaves.tree.paths, leaves.views, leaves.layout.cuts, strict=True)
    found = [path for path, view, cut in cuts if view and cut_axes(cut)]
    if found:
        raise ValueError(
            "mu_dtype='int8' finds the largest directions of whole matrices, but "
            f"shard_map cuts {paths.show_all(found)}; use mu_dtype='bfloat16' there, "
            "or update under jax.jit outside of jax.shard_map"
        )


@functools.partial(jax.jit, static_argnames="nesterov")
def _accumulate(
    beta: ArrayLike, momentum: jax.Array, gradient: jax.Array, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """The momentum to keep and the one to orthogonalize."""
    # A sum, as in Keller Jordan's code, and no average: what is orthogonalized has no
    # scale, so `M = beta M + (1 - beta) G` has the same direction. Sums are float32 or
    # wider: in bfloat16 they would lose gradients of less than 2^-9 of the momentum.
    dtype = momentum.dtype
    wide = np.promote_types(np.promote_types(dtype, jnp.float32), gradient.dtype)
    beta, gradient = jnp.asarray(beta, wide), gradient.astype(wide)
    if dtype == jnp.float16:
        gradient = gradient / FLOAT16_UNIT
    # The gradient is added to what is kept, as it was rounded: the update then depends
    # on the state alone, and a run that is resumed goes on as if it had not stopped.
    kept = beta * momentum.astype(wide) + gradient
    kept = kept if wide == dtype else _as_kept(kept, dtype)
    ahead = beta * kept + gradient if nesterov else kept
    return kept.astype(dtype), ahead.astype(dtype)


def _as_kept(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounded to `dtype`, as it stays.

    A compiler may leave out a conversion there and back, and see more than is kept.
    """

    def stored(x: jax.Array) -> jax.Array:
        rounded = x.astype(dtype)
        if jnp.finfo(dtype).bits == 16:
            rounded = jax.lax.optimization_barrier(rounded)
        return rounded.astype(x.dtype)

    # bfloat16 has the exponents of float32, so that fewer bits of the mantissa are all
    # that rounding is.
    def at_once(x: jax.Array) -> jax.Array:
        # A TPU then reads the gradient once. A GPU would store what is ahead, too.
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    if dtype == jnp.bfloat16:
        return jax.lax.platform_dependent(x, tpu=at_once, default=stored)
    return stored(x)


@functools.partial(jax.jit, static_argnames=("nesterov", "view"))
def _accumulate_in_8_bits(
    beta: ArrayLike,
    codes: jax.Array,
    scales: eight_bits.Scales,
    gradient: jax.Array,
    nesterov: bool,
    view: MatrixView,
) -> tuple[jax.Array, eight_bits.Scales, jax.Array]:
    """Codes and scales to keep, and the momentum to orthogonalize."""

    # On automatic axes, since XLA can shard all of this as the leaf is: maxima along
    # rows and columns, and products with some vectors.
    def accumulate(beta, codes, scales, gradient):
        wide = gradient.astype(jnp.float32)
        momentum = beta * eight_bits.decode(codes, scales, view) + wide
        kept = eight_bits.encode(momentum, scales, view)
        ahead = beta * momentum + wide if nesterov else momentum
        # A sum of what fits into float16 need not fit.
        dtype = jnp.float32 if gradient.dtype == jnp.float16 else gradient.dtype
        return *kept, ahead.astype(dtype)

    arguments = codes, scales, gradient
    return on_automatic_axes(
        accumulate,
        jnp.asarray(beta, jnp.float32),
        *arguments,
        results=jax.tree.map(explicit_spec, arguments),
    )

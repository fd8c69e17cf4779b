"""From gradients to the momentum that is kept, and the one that is orthogonalized."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from .._layout.layout import cut_axes, Layout
from .._layout.shardings import PlacedLeaf
from .._layout.state import state_by_path, zeros_by_path, zeros_like
from .._matrices.stacks import MatrixView
from .._mesh_axes import explicit_spec, on_automatic_axes
from .._options import check_first, FloatDType, is_float, SHARE
from .._parameters import paths
from . import eight_bits


class ScaleByMuonState(NamedTuple):
    """State of [`scale_by_muon`][]: the momentum.

    - `mu`: like the params, in `mu_dtype`; the sum `M = beta*M + G` over `unit`; in 8
        bits, int8 codes.
    - `scales`: in 8 bits what decodes them, by the path of the leaf, else `None`.
    - `count`: the number of steps, for a `beta` that is a schedule. It is kept for
        every `beta`, so that a run can continue with another.
    - `unit`: float32, `()`; 32 if a leaf of `mu` is float16, which then does not
        overflow for a `beta` up to 0.96, else 1. The next update converts a state that
        was restored in another dtype.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.scale_by_muon().init({"w": jnp.ones((1, 2))}).mu
        {'w': Array([[0., 0.]], dtype=float32)}
    """

    mu: optax.Updates
    scales: dict[str, eight_bits.Scales] | None = None
    count: Any = None
    unit: Any = 1.0


def _unit(momentum: Any) -> float:
    """Returns the number by which momentum is divided before it is stored.

    float16 ends at 65,504, and gradients of size g add up to at most g / (1 - beta),
    20 g with the usual 0.95. In units of 32 the momentum of finite gradients is finite
    for every beta up to 1 - 1/32. Larger units would lose small entries: below 6e-5
    float16 rounds to multiples of 6e-8.
    """
    dtypes = [getattr(x, "dtype", None) for x in jax.tree.leaves(momentum)]
    return 32.0 if jnp.float16 in dtypes else 1.0


#: A dtype of momentum; `"int8"` is codes with scales.
MomentumDType = FloatDType | Literal["int8"]

_COMPLEX = "mu_dtype='int8' is for real matrices, but {} are complex; use mu_dtype=None"
_NO_FLOATS = (
    "{} are no floats of 16 bits or more. Give a mu_dtype, such as 'bfloat16', or keep "
    "what is not trained out of the params"
)
_CUT = (
    "mu_dtype='int8' finds the largest directions of whole matrices, but shard_map "
    "cuts {}; use mu_dtype='bfloat16' there, or update under jax.jit outside of "
    "jax.shard_map"
)


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


#: The default, as in modded-nanogpt: a long memory slows the first steps, in which
#: gradients turn fast, and helps later. Its gain over 0.95 is measured in
#: benchmarks/evidence/experiments.md, "Defaults" and "Momentum by length".
RISING_BETA = Rise(0.85, 0.95, 300)


class Momentum(NamedTuple):
    """How momentum is summed up and kept."""

    beta: Beta
    nesterov: bool
    dtype: np.dtype | None  # the params' if None; int8 is codes

    def init(self, params: optax.Params, layout: Layout) -> ScaleByMuonState:
        if callable(self.beta):
            check_first("beta", self.beta(np.int32(0)), SHARE)
        if self.dtype is None:
            _refuse(layout, lambda leaf: not is_float(leaf.array.dtype), _NO_FLOATS)
        elif self.dtype == np.int8:
            _refuse(layout, lambda leaf: jnp.iscomplexobj(leaf.array), _COMPLEX)
            _refuse(layout, lambda leaf: cut_axes(leaf.cut), _CUT)
        mu = zeros_like(params, layout, self.dtype)
        scales = None
        if self.dtype == np.int8:
            parts = {
                paths.show(leaf.path): eight_bits.parts_of_scales(leaf.path, leaf.view)
                for leaf in layout.leaves
                if leaf.view and math.prod(leaf.view.shape)
            }
            scales = zeros_by_path(params, layout, parts)
        # Counted for every beta, so that a run can go on with a schedule.
        count, unit = jnp.zeros((), jnp.int32), jnp.asarray(_unit(mu), jnp.float32)
        return ScaleByMuonState(mu, scales, count, unit)

    def update(
        self, state: ScaleByMuonState, layout: Layout, gradients: Sequence[PlacedLeaf]
    ) -> tuple[list[PlacedLeaf], ScaleByMuonState]:
        """Returns leaves with the momentum to orthogonalize, and the state."""
        beta: Any = self.beta(state.count) if callable(self.beta) else self.beta
        if not isinstance(self.beta, float | int):
            # With a schedule's NaN, or a beta above 1, the sum would be lost, or grow.
            beta = jnp.where(beta > 0, jnp.minimum(beta, 1), 0)
        kept, ahead = layout.tree.of(state.mu), list(gradients)
        # By the state's dtypes: a restored state keeps those that it was saved with.
        unit = _unit(state.mu)
        unit_ratio = state.unit / unit
        # Scales are by path, since leaves without a matrix have none.
        last: Any = state.scales
        scales: dict[str, eight_bits.Scales] = {}
        if is_coded := self.dtype == np.int8:
            _refuse(layout, lambda leaf: cut_axes(leaf.cut), _CUT)
        for i, leaf in enumerate(gradients):
            if leaf.view is None:
                continue
            if is_coded:
                name = paths.show(leaf.path)
                kept[i], scales[name], x = _accumulate_in_8_bits(
                    beta, kept[i], last[name], leaf.array, self.nesterov, leaf.view
                )
            else:
                kept[i], x = _accumulate(
                    beta, kept[i], leaf.array, self.nesterov, unit, unit_ratio
                )
            ahead[i] = leaf._replace(array=x)
        mu = layout.tree.unflatten(kept)
        coded = state_by_path(layout, scales) if is_coded else None
        count = optax.safe_increment(state.count)
        after = ScaleByMuonState(mu, coded, count, jnp.asarray(unit, jnp.float32))
        return ahead, after


def _refuse(layout: Layout, is_of: Callable[[PlacedLeaf], Any], problem: str) -> None:
    """Raises for matrices whose momentum cannot be kept."""
    if refused := [leaf.path for leaf in layout.leaves if leaf.view and is_of(leaf)]:
        raise ValueError(problem.format(paths.show_all(refused)))


@functools.partial(jax.jit, static_argnames=("nesterov", "unit"))
def _accumulate(
    beta: ArrayLike,
    momentum: jax.Array,
    gradient: jax.Array,
    nesterov: bool,
    unit: float | None = None,
    unit_ratio: ArrayLike = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Returns the momentum to keep and the one to orthogonalize, both over `unit`.

    `unit_ratio` is the unit of the given momentum over `unit`.
    """
    # A sum, as in Keller Jordan's code, and no average: orthogonalization removes the
    # scale, so `M = beta M + (1 - beta) G` has the same direction. Sums are float32 or
    # wider: in bfloat16 they would lose gradients of less than 2^-9 of the momentum.
    dtype = momentum.dtype
    wide = np.promote_types(np.promote_types(dtype, jnp.float32), gradient.dtype)
    beta, gradient = jnp.asarray(beta, wide), gradient.astype(wide)
    unit = _unit(momentum) if unit is None else unit
    gradient = gradient / unit if unit != 1 else gradient
    # Nesterov's step starts from the rounded momentum: the update then depends on the
    # state alone, and a resumed run goes on as if it had not stopped.
    kept = beta * jnp.asarray(unit_ratio, wide) * momentum.astype(wide) + gradient
    kept = kept if wide == dtype else _as_kept(kept, dtype)
    ahead = beta * kept + gradient if nesterov else kept
    return kept.astype(dtype), ahead.astype(dtype)


def _as_kept(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds to `dtype`, and returns the result in the dtype of `x`.

    A compiler may drop a conversion there and back, and see more bits than are kept.
    """

    def stored(x: jax.Array) -> jax.Array:
        rounded = x.astype(dtype)
        if jnp.finfo(dtype).bits == 16:
            rounded = jax.lax.optimization_barrier(rounded)
        return rounded.astype(x.dtype)

    def at_once(x: jax.Array) -> jax.Array:
        # bfloat16 has the exponents of float32, so only the mantissa is rounded. A TPU
        # then reads the gradient once. A GPU would store `ahead`, too.
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
    """Returns codes and scales to keep, and the momentum to orthogonalize."""

    # On automatic axes, since XLA can shard all of this as the leaf is: maxima along
    # rows and columns, and products with some vectors.
    def accumulate(beta, codes, scales, gradient):
        wide = gradient.astype(jnp.float32)
        momentum = beta * eight_bits.decode(codes, scales, view) + wide
        kept = eight_bits.encode(momentum, scales, view)
        ahead = beta * momentum + wide if nesterov else momentum
        # A sum of gradients may overflow float16.
        dtype = jnp.float32 if gradient.dtype == jnp.float16 else gradient.dtype
        return *kept, ahead.astype(dtype)

    arguments = codes, scales, gradient
    return on_automatic_axes(
        accumulate,
        jnp.asarray(beta, jnp.float32),
        *arguments,
        results=jax.tree.map(explicit_spec, arguments),
    )

"""NorMuon: the neurons of an orthogonalized update take steps of like size."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from .._layout.layout import cut_axes
from .._layout.shardings import Shardings
from .._layout.zeros import StatePart, zero_parts
from .._matrices.view import MatrixView
from .._options import NOT_NEGATIVE, number, SHARE
from .._parameters import paths
from .._parameters.dimension_numbers import DimensionNumbers
from .._parameters.given import Model, numbers_of
from .leaves import check_matrices_only, Leaves, read_leaves


class NormalizeNeuronsState(NamedTuple):
    """State of [`normalize_neurons`][]: a mean square for each neuron.

    - `v`: float32, by the path of the leaf, in its shape but 1 along the shorter side
        of its matrices.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.normalize_neurons().init({"w": jnp.ones((2, 3))}).v
        {'w': Array([[0., 0., 0.]], dtype=float32)}
    """

    # By path, so that what a param's metadata say of its axes, in Flax's boxes, is not
    # taken for what is here.
    v: dict[str, jax.Array]


def normalize_neurons(
    b2: float | jax.Array = 0.95,
    *,
    eps: float | jax.Array = 1e-10,
    model: Model | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    shardings: Shardings | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each neuron of an update by its root mean square over time.

    $$v_t = b_2 v_{t-1} + (1 - b_2)\,\mathrm{mean}(o^2), \qquad
      o' = \frac{o}{\sqrt{\max(v_t, \epsilon)}}, \qquad
      u = o' \frac{\lVert o \rVert_F}{\lVert o' \rVert_F}$$

    The mean is over the shorter side, so that there is one $v$ for each entry of the
    longer one: orthogonalization has made the others even already. Square matrices stay
    as they are. Every matrix keeps its Frobenius norm, so that a learning rate carries
    over. It comes after [`scale_by_muon`][], and reads the same axes; on a mesh no
    more than a vector of each matrix is exchanged.

    **Arguments:**

    - `b2`: decay of the mean square.
    - `eps`: the least mean square.
    - `model`, `dimension_numbers`: as for [`scale_by_muon`][].
    - `shardings`: as for [`scale_by_muon`][], needed inside `jax.shard_map` alone.

    **Returns:** an `optax.GradientTransformationExtraArgs`. Updates keep their dtype;
    the state `v` is float32, a vector for each matrix.

    **Raises:** `ValueError` for a `b2` outside [0, 1]; at `init` as
    [`scale_by_muon`][] does, naming the paths.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> tx = mc.normalize_neurons()
        >>> update = {"w": jnp.array([[3.0, 0.0, 4.0], [0.0, 5.0, 0.0]])}
        >>> tx.update(update, tx.init(update))[0]["w"].round(2)
        Array([[4.08, 0.  , 4.08],
               [0.  , 4.08, 0.  ]], dtype=float32)

    ??? cite "References"

        Li et al., "NorMuon", arXiv:2510.05491, Algorithm 1, which always has one $v$
        for each output; the longer side is that of modded-nanogpt and nanochat.
    """
    number("b2", b2, SHARE)
    number("eps", eps, NOT_NEGATIVE)
    numbers = numbers_of(model, dimension_numbers)

    def read(tree: Any) -> Leaves:
        leaves = read_leaves(tree, numbers, shardings)
        check_matrices_only(leaves, "normalize_neurons")
        return leaves

    def init_fn(params: optax.Params) -> optax.OptState:
        return neuron_normalization(read(params), b2, eps).init(params)

    def update_fn(updates, state, params=None, **extra_args):
        normalization = neuron_normalization(read(updates), b2, eps)
        return normalization.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def neuron_normalization(
    leaves: Leaves, b2: float | jax.Array, eps: float | jax.Array = 1e-10
) -> optax.GradientTransformationExtraArgs:
    """`normalize_neurons` for leaves; those without a view pass through."""

    def init_fn(params: optax.Params) -> NormalizeNeuronsState:
        axes = {i: _short_axes(view) for i, view in enumerate(leaves.views)}
        parts = [
            (i, StatePart(jnp.float32, dict.fromkeys(short, 1)))
            for i, short in axes.items()
            if short
        ]
        names = [paths.show(leaves.tree.paths[i]) for i, _ in parts]
        zeros = zero_parts(params, leaves.layout, parts)
        return NormalizeNeuronsState(dict(zip(names, zeros, strict=True)))

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        tree, results, v = leaves.tree, leaves.tree.of(updates), {}
        pairs = zip(leaves.views, leaves.layout.cuts, strict=True)
        for i, (view, cut) in enumerate(pairs):
            if view is not None and _short_axes(view):
                name = paths.show(tree.paths[i])
                results[i], v[name] = _normalize(
                    results[i], state.v[name], view, cut, b2, eps
                )
        return tree.unflatten(results), NormalizeNeuronsState(v)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _short_axes(view: MatrixView | None) -> tuple[int, ...]:
    """The axes to take the mean over; none where there is nothing to do."""
    if view is None or not math.prod(view.shape) or view.fan_in == view.fan_out:
        return ()
    return view.reduction if view.fan_in < view.fan_out else view.output


def _normalize(
    o: jax.Array, v: jax.Array, view: MatrixView, cut: PartitionSpec, b2: Any, eps: Any
) -> tuple[jax.Array, jax.Array]:
    short = _short_axes(view)
    long = view.output if short == view.reduction else view.reduction
    wide = o.astype(np.promote_types(o.dtype, jnp.float32))
    mean = jnp.mean(jnp.square(jnp.abs(wide)), short, keepdims=True)
    # Of blocks of equal size the mean of means is the mean.
    mean = jax.lax.pmean(mean, cut_axes(cut, short))
    b2 = jnp.asarray(b2, v.dtype)
    v = b2 * v + (1 - b2) * mean.astype(v.dtype)
    divisor = jnp.maximum(v, jnp.asarray(eps, v.dtype)).astype(mean.dtype)
    # |o|^2 is the sum over the long side of `mean`, times the size of the short one,
    # and |o'|^2 that of `mean / v`: norms follow from vectors, and none is taken of the
    # matrix.
    sums = [jnp.sum(x, long, keepdims=True) for x in (mean, mean / divisor)]
    before, after = jax.lax.psum(sums, cut_axes(cut, long))
    is_zero = before == 0  # and then has no derivative
    kept = jnp.where(is_zero, 1, before) / jnp.where(is_zero, 1, after)
    return (wide * jnp.sqrt(kept) * jax.lax.rsqrt(divisor)).astype(o.dtype), v

"""Muon: momentum, orthogonalized.

gradients -> momentum -> matrices -> Newton-Schulz -> scale by shape -> weight decay
-> learning rate. `scale_by_muon` is the first four arrows, `muon` all of them beside
AdamW for the leaves that hold no matrix.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from . import _paths
from ._coefficients import resolve_schedule, Schedule, Triple
from ._dimension_numbers import (
    DimensionNumbers,
    matrix_views,
    resolve_dimension_numbers,
)
from ._matrices import MatrixView
from ._newton_schulz import newton_schulz
from ._orthogonalize import orthogonalize


class ScaleByMuonState(NamedTuple):
    """State of [`scale_by_muon`][]: nothing but the momentum."""

    mu: optax.Updates  # like params, in mu_dtype


def scale_by_muon(
    *,
    beta: float | jax.Array = 0.95,
    nesterov: bool = True,
    ns_coeffs: str | Triple | Schedule = "keller",
    ns_steps: int | jax.Array = 5,
    consistent_rms: float | jax.Array | None = 0.2,
    mu_dtype: DTypeLike | None = None,
    dimension_numbers: DimensionNumbers | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns gradients into orthogonalized momentum, scaled by shape.

    $$M_t = \beta M_{t-1} + G_t, \qquad
      O_t = \mathrm{NewtonSchulz}(G_t + \beta M_t \text{ or } M_t), \qquad
      u_t = \rho\, O_t$$

    with $\rho = 0.2 \sqrt{\max(\mathrm{fan_{in}}, \mathrm{fan_{out}})}$
    (`consistent_rms=0.2`), which gives updates the root mean square of AdamW's, or
    $\rho = \sqrt{\max(1, \mathrm{fan_{out}} / \mathrm{fan_{in}})}$
    (`consistent_rms=None`).

    Three deviations between the sources, all of which this function spans:
    Keller Jordan, Moonlight's code and torch use Nesterov momentum, Kimi K2's
    Algorithm 1 does not; Kimi and Moonlight scale by the maximum, Keller Jordan by
    the ratio; optax averages momentum with bias correction, which without
    Nesterov is the same direction.

    **Arguments:**

    - `beta`: momentum decay.
    - `nesterov`: whether to look one step ahead.
    - `ns_coeffs`, `ns_steps`: as for [`newton_schulz`][].
    - `consistent_rms`: root mean square of the update, or `None`.
    - `mu_dtype`: dtype of the momentum and of the iteration; the params' if `None`.
    - `dimension_numbers`: a tree of `optax.contrib.MuonDimensionNumbers`, a prefix
        of one, or a function of the params. By default
        [`flax_dimension_numbers`][].

    **Returns:** an `optax.GradientTransformationExtraArgs`. Updates keep the dtype
    they came with.

    **Raises:** `ValueError` at construction for bad coefficients; at `init`, naming
    the paths, for leaves that hold no matrix or whose axes are ambiguous.

    !!! example

        >>> import jax, operator, optax
        >>> import muonclip_jax as mc
        >>> tx = optax.chain(
        ...     optax.masked(mc.scale_by_muon(), mc.matrix_mask),
        ...     optax.masked(
        ...         optax.scale_by_adam(),
        ...         lambda p: jax.tree.map(operator.not_, mc.matrix_mask(p)),
        ...     ),
        ...     optax.scale_by_learning_rate(1e-3),
        ... )

    ??? cite "References"

        Jordan et al., "Muon", 2024; Liu et al., "Muon is Scalable for LLM Training",
        arXiv:2502.16982, eq. 4; Kimi Team, "Kimi K2", arXiv:2507.20534, Algorithm 1.
    """
    resolve_schedule(ns_coeffs, ns_steps)
    iterate = functools.partial(newton_schulz, ns_coeffs=ns_coeffs, ns_steps=ns_steps)

    def init_fn(params: optax.Params) -> ScaleByMuonState:
        _matrices_only(dimension_numbers, params)
        return ScaleByMuonState(mu=optax.tree.zeros_like(params, dtype=mu_dtype))

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        tree = _paths.flatten(updates)
        views = _matrices_only(dimension_numbers, updates)
        decay = functools.partial(_decay, beta)
        mu = jax.tree.map(decay, state.mu, updates)
        momentum = jax.tree.map(decay, mu, updates) if nesterov else mu
        directions = orthogonalize(tree.of(momentum), views, iterate)
        scaled = [
            (d * _shape_scale(v, consistent_rms)).astype(g.dtype) if v else d
            for d, v, g in zip(directions, views, tree.leaves, strict=True)
        ]
        return tree.unflatten(scaled), ScaleByMuonState(mu=mu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta: float | jax.Array = 0.95,
    nesterov: bool = True,
    ns_coeffs: str | Triple | Schedule = "keller",
    ns_steps: int | jax.Array = 5,
    consistent_rms: float | jax.Array | None = 0.2,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
    mu_dtype: DTypeLike | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float | jax.Array = 0.9,
    adam_b2: float | jax.Array = 0.95,
    adam_eps: float | jax.Array = 1e-8,
    adam_weight_decay: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon for the matrices, AdamW for the rest.

    $$W_t = W_{t-1} - \eta_t\,(u_t + \lambda W_{t-1})$$

    with $u_t$ from [`scale_by_muon`][] where a leaf holds matrices and from
    `optax.scale_by_adam` elsewhere. [`describe`][] prints which leaf goes where.

    **Arguments:**

    - `learning_rate`: a float or a schedule. With `consistent_rms=0.2` a learning rate
        and weight decay tuned for AdamW carry over.
    - `beta`, `nesterov`, `ns_coeffs`, `ns_steps`, `consistent_rms`, `mu_dtype`,
        `dimension_numbers`: as for [`scale_by_muon`][]; `None` in
        `dimension_numbers` sends a leaf to AdamW.
    - `weight_decay`: decoupled, multiplied by the learning rate.
    - `weight_decay_mask`: a tree of bools or a function of the params, for both.
    - `adam_learning_rate`, `adam_weight_decay`: those of Muon if `None`.
    - `adam_b1`, `adam_b2`, `adam_eps`: as for `optax.adamw`.

    **Returns:** an `optax.GradientTransformationExtraArgs`.

    **Raises:** `ValueError` as [`scale_by_muon`][] does.

    !!! example

        >>> import jax, jax.numpy as jnp, optax
        >>> import muonclip_jax as mc
        >>> params = {"w": jnp.eye(3), "bias": jnp.ones(3)}
        >>> loss = lambda p: jnp.sum((p["w"] @ p["bias"] - 2.0) ** 2)
        >>> tx = mc.muon(0.1, weight_decay=0.0)
        >>> state = tx.init(params)
        >>> print(f"{loss(params):.3f}")
        3.000
        >>> for _ in range(20):
        ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> bool(loss(params) < 0.1)
        True

    ??? cite "References"

        Jordan et al., "Muon", 2024; Liu et al., "Muon is Scalable for LLM Training",
        arXiv:2502.16982.
    """
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    if adam_weight_decay is None:
        adam_weight_decay = weight_decay
    resolve_schedule(ns_coeffs, ns_steps)

    def build(params: optax.Params) -> optax.GradientTransformationExtraArgs:
        numbers = resolve_dimension_numbers(dimension_numbers, params)
        decayed = weight_decay_mask
        if callable(decayed):
            decayed = decayed(params)
        direction = scale_by_muon(
            beta=beta,
            nesterov=nesterov,
            ns_coeffs=ns_coeffs,
            ns_steps=ns_steps,
            consistent_rms=consistent_rms,
            mu_dtype=mu_dtype,
            dimension_numbers=numbers,
        )
        return optax.partition(
            {
                "muon": optax.chain(
                    direction,
                    optax.add_decayed_weights(weight_decay, decayed),
                    optax.scale_by_learning_rate(learning_rate),
                ),
                "adamw": optax.chain(
                    optax.scale_by_adam(adam_b1, adam_b2, adam_eps, mu_dtype=mu_dtype),
                    optax.add_decayed_weights(adam_weight_decay, decayed),
                    optax.scale_by_learning_rate(adam_learning_rate),
                ),
            },
            _labels(numbers, params),
        )

    # Biases tell which axes of a general kernel are inputs, so axes and masks are read
    # off the whole tree, here, and not off what `partition` leaves in sight.
    def init_fn(params: optax.Params) -> optax.OptState:
        return build(params).init(params)

    def update_fn(updates, state, params=None, **extra_args):
        directions, state = build(updates).update(updates, state, params, **extra_args)
        # optax's Adam answers bfloat16 gradients in mu_dtype.
        cast = jax.tree.map(lambda d, g: d.astype(g.dtype), directions, updates)
        return cast, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _decay(beta: ArrayLike, momentum: jax.Array, gradient: jax.Array) -> jax.Array:
    return jnp.asarray(beta * momentum + gradient, momentum.dtype)


def _shape_scale(view: MatrixView, consistent_rms: ArrayLike | None) -> ArrayLike:
    if consistent_rms is None:
        return math.sqrt(max(1.0, view.fan_out / view.fan_in))
    return consistent_rms * math.sqrt(max(view.fan_in, view.fan_out))


def _matrices_only(dimension_numbers, params) -> list[MatrixView | None]:
    """The view of each visible leaf; raises for one that holds no matrix."""
    tree = _paths.flatten(params)
    views = matrix_views(dimension_numbers, params)
    strays = [
        path
        for path, leaf, view in zip(tree.paths, tree.leaves, views, strict=True)
        if view is None and not _paths.is_masked(leaf)
    ]
    if strays:
        raise ValueError(
            f"scale_by_muon was handed leaves that hold no matrix: "
            f"{_paths.show_all(strays)}. Wrap it as optax.masked(mc.scale_by_muon(), "
            "mc.matrix_mask), use mc.muon, or name their axes in dimension_numbers"
        )
    return views


def _labels(numbers: Any, params: optax.Params) -> Any:
    tree = _paths.flatten(params)
    views = matrix_views(numbers, params)
    return tree.unflatten(
        [
            leaf if _paths.is_masked(leaf) else "adamw" if view is None else "muon"
            for leaf, view in zip(tree.leaves, views, strict=True)
        ]
    )

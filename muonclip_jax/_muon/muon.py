"""Muon for the matrices of a model, AdamW for the rest.

gradients -> momentum -> matrices -> Newton-Schulz -> scale by shape -> neurons
normalized, if asked for -> weight decay -> learning rate. `Direction` is the first four
arrows.
"""

from __future__ import annotations  # help() shows aliases by name

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .._calls import explained
from .._layout.layout import Layout
from .._layout.shardings import Shardings
from .._layout.state import zeros_like
from .._model.knowledge import knowledge_of
from .._model.model_reading import ModelReading
from .._newton_schulz.newton_schulz import Orthogonalizer
from .._options import BELOW_ONE, check_flag, check_number, NOT_NEGATIVE, SHARE
from .._parameters.dimension_numbers import DimensionNumbers, FROZEN
from .leaves import for_leaves, optimizer_of
from .momentum import MomentumDType, RISING_BETA
from .normalize_neurons import neuron_normalization
from .scale_by_muon import make_direction, ShapeScale
from .weight_decay import check_rates, decay_mask, decayed_weights, Mask


@explained
def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta: optax.ScalarOrSchedule = RISING_BETA,
    nesterov: bool = True,
    orthogonalizer: Orthogonalizer = "keller",
    consistent_rms: ShapeScale = 0.2,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    weight_decay_mask: Mask = None,
    mu_dtype: MomentumDType | None = None,
    model: ModelReading | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    per_head: bool | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float | jax.Array = 0.9,
    adam_b2: float | jax.Array = 0.95,
    adam_eps: float | jax.Array = 1e-8,
    adam_weight_decay: optax.ScalarOrSchedule | None = None,
    cautious_weight_decay: bool = False,
    neuron_b2: float | jax.Array | None = None,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
    slow_axes: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon for the matrices, AdamW for the rest.

    $$W_t = W_{t-1} - \eta_t\,(u_t + \lambda W_{t-1})$$

    with $u_t$ from [`scale_by_muon`][] for leaves that hold matrices and from
    `optax.scale_by_adam` for the others. Leaves whose gradient is stopped, as a `model`
    shows, do not change. [`describe`][] prints which leaf uses which.

    **Arguments:**

    - `learning_rate`: a float or a schedule, also for AdamW's parameters. Set it to
        twice that of your tuned AdamW, at most 0.03, and keep its weight decay.
    - `beta`: decay of the momentum: a number, or a schedule such as the default.
    - `nesterov`: whether to look one step ahead.
    - `orthogonalizer`: a name of [`NS_COEFFS`][], a [`NewtonSchulz`][], or a function
        of your own.
    - `consistent_rms`: as for [`scale_by_muon`][].
    - `weight_decay`: decoupled, multiplied by the learning rate.
    - `weight_decay_mask`: the leaves that decay: a tree of bools, a prefix of one, or a
        function of the params.
    - `mu_dtype`: dtype of the momentum, the params' if `None`. `"int8"` is for Muon's
        momentum; AdamW's then has the params' dtype.
    - `model`: what [`read_model`][] returns. Without it, names and shapes decide.
    - `dimension_numbers`: a tree of the axes of matrices, or a mapping from patterns of
        paths to axes; `None` in place of axes is AdamW. It overrides `model`.
    - `per_head`: whether every head is a matrix of its own; by default if heads are
        known.
    - `adam_learning_rate`: that of AdamW's parameters, `learning_rate` if `None`.
    - `adam_b1`: as for `optax.adamw`.
    - `adam_b2`: as for `optax.adamw`.
    - `adam_eps`: as for `optax.adamw`.
    - `adam_weight_decay`: that of AdamW's parameters, `weight_decay` if `None`.
    - `cautious_weight_decay`: whether to decay only what the step makes smaller, as
        [`add_cautious_decayed_weights`][] does.
    - `neuron_b2`: decay of the mean squares by which [`normalize_neurons`][] divides
        (NorMuon); `None` leaves that out.
    - `shardings`: how a mesh shards the params.
    - `axis_name`: the mapped axis, or axes, that divide the batch.
    - `slow_axes`: the axis of a mesh, or axes, along which copies repeat the work.

    [`scale_by_muon`][] has more about its arguments.

    **Returns:** an `optax.GradientTransformationExtraArgs`.

    **Raises:** `ValueError` as [`scale_by_muon`][] does, for `per_head=True` with
    `dimension_numbers` for all leaves, for a `neuron_b2` outside [0, 1], and from an
    update without params.

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
    learning_rate, weight_decay, adam_learning_rate, adam_weight_decay = check_rates(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        adam_learning_rate=adam_learning_rate,
        adam_weight_decay=adam_weight_decay,
    )
    # Below 1, since the correction of the bias divides by 1 - b^t.
    check_number("adam_b1", adam_b1, BELOW_ONE)
    check_number("adam_b2", adam_b2, BELOW_ONE)
    check_number("adam_eps", adam_eps, NOT_NEGATIVE)
    check_number("neuron_b2", neuron_b2, SHARE, "None")
    cautious_weight_decay = check_flag("cautious_weight_decay", cautious_weight_decay)
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    if adam_weight_decay is None:
        adam_weight_decay = weight_decay
    direction = make_direction(
        beta, nesterov, orthogonalizer, consistent_rms, mu_dtype, slow_axes
    )
    # int8 is a code of matrices, which Adam's leaves are not.
    adam_mu_dtype = None if direction.momentum.dtype == jnp.int8 else mu_dtype
    # Optax's own, so that leaves which are no matrices follow `optax.adamw` to the bit.
    adam = optax.scale_by_adam(adam_b1, adam_b2, adam_eps, mu_dtype=adam_mu_dtype)

    def build(layout: Layout) -> optax.GradientTransformationExtraArgs:
        # A function gets the whole tree, and both groups below see its bools through
        # their own masks.
        mask = decay_mask(weight_decay_mask, layout.whole)
        decay = functools.partial(
            decayed_weights, mask=mask, is_cautious=cautious_weight_decay
        )
        # Before decay, which is not normalized (arXiv:2510.05491, Algorithm 1).
        normalization = (
            [neuron_normalization(layout, neuron_b2)] if neuron_b2 is not None else []
        )
        groups: dict[Hashable, optax.GradientTransformation] = {
            "muon": optax.chain(
                direction.of(layout),
                *normalization,
                decay(weight_decay),
                optax.scale_by_learning_rate(learning_rate),
            ),
            "adamw": optax.chain(
                _sharded_like_params(adam, layout, adam_mu_dtype),
                decay(adam_weight_decay),
                optax.scale_by_learning_rate(adam_learning_rate),
            ),
            # Always there, so that a state has the same structure whatever is frozen.
            FROZEN: optax.set_to_zero(),
        }
        labels = layout.tree.unflatten(map(optimizer_of, layout.leaves))
        # As a function: `partition` refuses a tree with other containers than the
        # params, such as boxes and NNX's states.
        return optax.partition(groups, lambda _: labels)

    return for_leaves(
        "muon",
        build,
        optax.transforms.PartitionState,
        knowledge_of(model, None, dimension_numbers, per_head),
        shardings=shardings,
        axis_name=axis_name,
    )


def _sharded_like_params(
    adam: optax.GradientTransformation, layout: Layout, mu_dtype: DTypeLike | None
) -> optax.GradientTransformation:
    def init_fn(params: optax.Params) -> optax.ScaleByAdamState:
        # Under `jit` zeros depend on no param, and would be replicated.
        mu, nu = (zeros_like(params, layout, x) for x in (mu_dtype, None))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update_fn(updates, state, params=None):
        updates, after = adam.update(updates, state, params)
        # optax's Adam promotes its averages with the gradients, which may be wider.
        after = jax.tree.map(lambda x, old: x.astype(old.dtype), after, state)
        return updates, after

    return optax.GradientTransformation(init_fn, update_fn)

"""MuonClip: Muon, then QK-Clip."""

from __future__ import annotations  # help() shows aliases by name

from collections.abc import Hashable
from typing import Any

import jax
import optax

from ._calls import explained
from ._layout.layout import over_replicas
from ._layout.shardings import Shardings
from ._model.attention_layers import Attention
from ._model.knowledge import knowledge_of
from ._model.model_reading import ModelReading
from ._muon.momentum import MomentumDType, RISING_BETA
from ._muon.muon import muon
from ._muon.scale_by_muon import ShapeScale
from ._muon.weight_decay import Mask
from ._newton_schulz.newton_schulz import Orthogonalizer
from ._options import check_state
from ._parameters.dimension_numbers import DimensionNumbers
from ._qk_clip.qk_clip import qk_clip


@explained
def muonclip(
    learning_rate: optax.ScalarOrSchedule,
    *,
    threshold: optax.ScalarOrSchedule = 100.0,
    alpha: optax.ScalarOrSchedule = 0.5,
    model: ModelReading | None = None,
    attention: Attention | None = None,
    beta: optax.ScalarOrSchedule = RISING_BETA,
    nesterov: bool = True,
    orthogonalizer: Orthogonalizer = "keller",
    consistent_rms: ShapeScale = 0.2,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    weight_decay_mask: Mask = None,
    mu_dtype: MomentumDType | None = None,
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
    """The optimizer of Kimi K2 (arXiv:2507.20534): [`muon`][], then [`qk_clip`][].

    Nothing may come after it in a chain: a step that changes its updates undoes the
    clip. Put `optax.clip_by_global_norm` before it, factors into the learning rate, and
    use [`multi_steps`][] in place of `optax.apply_every`.

    **Arguments:**

    - `learning_rate`: twice that of your tuned AdamW, at most 0.03; or a schedule.
    - `threshold`: heads with a larger logit are clipped; a number or a schedule.
    - `alpha`: the query's share of the scaling, in [0, 1], or a schedule of it.
    - `model`: what [`read_model`][] returns. Without it, names and shapes decide.
    - `attention`: the layers to clip, if not those of `model`; as for [`qk_clip`][].
    - all others: as for [`muon`][], which has a line for each.

    **Returns:** an `optax.GradientTransformationExtraArgs` whose update is
    `tx.update(grads, state, params, attention_stats=stats)`.

    **Raises:** `ValueError` as [`muon`][] and [`qk_clip`][] do.

    !!! example

        >>> import jax.numpy as jnp, muonclip_jax as mc
        >>> kernel = jnp.ones((8, 2, 4))  # two heads
        >>> params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
        >>> stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> tx = mc.muonclip(1e-3)
        >>> _, state = tx.update(params, tx.init(params), params, attention_stats=stats)
        >>> int(mc.scalars(state, params)["num_clipped"])
        1
    """
    # One for both, so that the heads that QK-Clip scales are those that Newton-Schulz
    # sees by themselves.
    knowledge: Any = knowledge_of(model, attention, dimension_numbers, per_head)
    # QK-Clip is last, since it scales the weights after the step (arXiv:2507.20534,
    # algorithm 1): it has to see the update with learning rate and weight decay in it.
    # Before the learning rate it would scale a direction, not a weight.
    tx = optax.chain(
        muon(
            learning_rate,
            beta=beta,
            nesterov=nesterov,
            orthogonalizer=orthogonalizer,
            consistent_rms=consistent_rms,
            weight_decay=weight_decay,
            weight_decay_mask=weight_decay_mask,
            mu_dtype=mu_dtype,
            model=knowledge,
            adam_learning_rate=adam_learning_rate,
            adam_b1=adam_b1,
            adam_b2=adam_b2,
            adam_eps=adam_eps,
            adam_weight_decay=adam_weight_decay,
            cautious_weight_decay=cautious_weight_decay,
            neuron_b2=neuron_b2,
            shardings=shardings,
            axis_name=axis_name,
            slow_axes=slow_axes,
        ),
        qk_clip(
            threshold,
            alpha=alpha,
            model=knowledge,
            shardings=shardings,
            axis_name=axis_name,
        ),
    )

    def update(updates, state, params=None, **extra_args):
        check_state("muonclip", isinstance(state, tuple | list) and len(state) == 2)
        return tx.update(updates, state, params, **extra_args)

    # So that `multi_steps` finds the axis: a chain is two functions, which hide it.
    return over_replicas(tx.init, update, axis_name)

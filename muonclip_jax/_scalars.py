"""A run in numbers, to log."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ._model.attention_layers import Attention
from ._parameters import paths
from ._parameters.dimension_numbers import DimensionNumbers, param_labels
from ._parameters.given import Model
from ._qk_clip.metrics import qk_clip_metrics, states_of
from ._qk_clip.qk_clip import QKClipState


def scalars(
    opt_state: Any,
    params: optax.Params,
    *,
    updates: optax.Updates | None = None,
    model: Model | None = None,
    attention: Attention | None = None,
    dimension_numbers: DimensionNumbers | None = None,
) -> dict[str, Any]:
    r"""Numbers of the last step by name, for wandb, TensorBoard or a CSV file.

    | name | number |
    |---|---|
    | `max_logit` | the largest finite logit of all heads |
    | `max_logit/<layer>` | that of one attention layer, of all of its stack |
    | `num_clipped`, `num_nonfinite` | heads that [`qk_clip`][] scaled; left alone |
    | `clipped_fraction`, `ever_clipped_fraction` | of all heads, in this step; ever |
    | `hyperparams/<name>` | of `optax.inject_hyperparams`, the learning rate too |
    | `param_norm/<label>` | $\lVert W \rVert_F$ of all leaves of a label |
    | `update_norm/<label>` | that of the `updates`, where they are given |

    Labels are those of [`param_labels`][]: `matrix`, `embedding`, `head`, ...

    **Arguments:**

    - `opt_state`: of any optimizer; what it has no state for is left out.
    - `params`, `model`, `attention`, `dimension_numbers`: as the optimizer has them.
    - `updates`: of the last step.

    **Returns:** a flat dict of Python numbers; under `jit` of float32 arrays.

    **Raises:** `ValueError` as [`qk_clip_metrics`][] and [`param_labels`][] do.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> params = {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)}}
        >>> tx = mc.muon(1e-2)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> for name, number in mc.scalars(state, params, updates=updates).items():
        ...     print(f"{name} {number:.2f}")
        param_norm/matrix 3.46
        param_norm/vector 0.00
        update_norm/matrix 0.01
        update_norm/vector 0.00
    """
    found: dict[str, Any] = {}
    if states_of(opt_state, QKClipState):
        metrics = qk_clip_metrics(opt_state, params, model=model, attention=attention)
        layers = metrics.pop("layers")
        found |= metrics
        for path, rows in layers.items():
            logits = rows["max_logits"]
            # As `max_logit` is: a head that overflowed is counted, and hides no other.
            is_finite = jnp.isfinite(logits)
            found[f"max_logit/{path or '(the root)'}"] = jnp.max(
                logits, initial=-jnp.inf, where=is_finite
            )
    for state in states_of(opt_state, _Injected):
        for name, value in state.hyperparams.items():
            if np.ndim(value) == 0:
                found[f"hyperparams/{name}"] = value
    tree = paths.flatten(params)
    labels = param_labels(params, model=model, dimension_numbers=dimension_numbers)
    for kind, leaves in (("param_norm", params), ("update_norm", updates)):
        if leaves is None:
            continue
        try:
            arrays = tree.of(leaves)
        except (TypeError, ValueError) as error:
            raise ValueError(f"updates are not like the params: {error}") from None
        sums: dict[str, Any] = {}
        for label, leaf in zip(tree.of(labels), arrays, strict=True):
            if not paths.is_masked(leaf) and not paths.is_masked(label):
                wide = jnp.abs(jnp.asarray(leaf)).astype(jnp.float32)
                sums[label] = sums.get(label, 0.0) + jnp.sum(jnp.square(wide))
        found |= {f"{kind}/{label}": jnp.sqrt(sums[label]) for label in sorted(sums)}
    return {
        name: x if isinstance(x, Tracer) else np.asarray(x).item()
        for name, x in found.items()
    }


_Injected = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)

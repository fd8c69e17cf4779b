"""What was tuned on a narrow model, for a wide one."""

import math
from typing import Any

import optax


def scale_to_width(
    width: int,
    *,
    tuned_at: int,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
) -> dict[str, Any]:
    r"""Arguments of [`muon`][] for a wider model than the one they were tuned on.

    With $r = \mathrm{tuned\_at} / \mathrm{width}$ and updates scaled by
    $\sqrt{\mathrm{fan_{out}} / \mathrm{fan_{in}}}$, the matrices keep their learning
    rate, and what is decayed in a step falls with the width on both sides:

    $$\eta \to \eta, \qquad \lambda \to r \lambda, \qquad
      \eta_\mathrm{adam} \to \sqrt{r}\, \eta_\mathrm{adam}, \qquad
      \lambda_\mathrm{adam} \to \sqrt{r}\, \lambda_\mathrm{adam}$$

    All four have to be tuned with `consistent_rms="mup"`. The rate of the AdamW side is
    a compromise: embeddings would keep theirs, and an output head would fall with $r$.

    **Arguments:**

    - `width`: of the residual stream, in features.
    - `tuned_at`: the width at which the rest was tuned.
    - `learning_rate`, `weight_decay`, `adam_learning_rate`: as for [`muon`][], floats
        or schedules.

    **Returns:** a dictionary of keyword arguments, for [`muon`][] and `muonclip`.

    **Raises:** `ValueError` for widths that are not positive.

    !!! example

        >>> import muonclip_jax as mc
        >>> arguments = mc.scale_to_width(
        ...     1024, tuned_at=256, learning_rate=0.03, adam_learning_rate=0.01
        ... )
        >>> arguments["weight_decay"], arguments["adam_learning_rate"]
        (0.025, 0.005)
        >>> tx = mc.muonclip(**arguments)

    ??? cite "References"

        Qiu et al., "Hyperparameter Transfer Enables Consistent Gains of
        Matrix-Preconditioned Optimizers Across Scales", arXiv:2512.05620, for the
        rates of matrices and their decay; the AdamW side is nanochat's rule.
    """
    if not (width > 0 and tuned_at > 0):
        raise ValueError(f"widths must be positive, got {width} and {tuned_at}")
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    ratio = tuned_at / width
    return dict(
        learning_rate=learning_rate,
        consistent_rms="mup",
        weight_decay=_scaled(weight_decay, ratio),
        adam_learning_rate=_scaled(adam_learning_rate, math.sqrt(ratio)),
        adam_weight_decay=_scaled(weight_decay, math.sqrt(ratio)),
    )


def _scaled(value: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    if callable(value):
        return lambda count: factor * value(count)
    return factor * value

"""What was tuned on a narrow model, for a wide one."""

import math
from typing import Any

import optax

from .._options import number, POSITIVE
from .weight_decay import check_rates


def scale_to_width(
    width: int,
    *,
    tuned_at: int,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_weight_decay: optax.ScalarOrSchedule | None = None,
    head_learning_rate: optax.ScalarOrSchedule | None = None,
) -> dict[str, Any]:
    r"""Arguments of [`muon`][] for a wider model than the one they were tuned on.

    With $r = \mathrm{tuned\_at} / \mathrm{width}$ and updates scaled by
    $\sqrt{\mathrm{fan_{out}} / \mathrm{fan_{in}}}$, the learning rate of matrices falls
    with the cube root of the width, that of the output head with the width, and that of
    AdamW's other leaves with its root. All leaves keep their decay:

    $$\eta \to \sqrt[3]{r}\, \eta, \qquad \lambda \to \lambda, \qquad
      \eta_\mathrm{adam} \to \sqrt{r}\, \eta_\mathrm{adam}, \qquad
      \eta_\mathrm{head} \to r\, \eta_\mathrm{head}$$

    All have to be tuned with `consistent_rms="mup"`, both decays by themselves: what
    suits the matrices is far too much for an embedding.

    **Arguments:**

    - `width`: of the residual stream, in features.
    - `tuned_at`: the width at which the rest was tuned.
    - `learning_rate`, `weight_decay`, `adam_learning_rate`, `adam_weight_decay`,
        `head_learning_rate`: as for [`muon`][], floats or schedules.

    **Returns:** a dictionary of keyword arguments, for [`muon`][] and `muonclip`. A
    model without an output head, where the embedding is the output too, takes them with
    `head_learning_rate=None`: `mc.muon(**arguments | {"head_learning_rate": None})`.

    **Raises:** `ValueError` for widths that are not positive.

    !!! example

        >>> import muonclip_jax as mc
        >>> arguments = mc.scale_to_width(
        ...     2048,
        ...     tuned_at=256,
        ...     learning_rate=0.03,
        ...     weight_decay=0.4,
        ...     adam_learning_rate=0.1,
        ...     adam_weight_decay=0.05,
        ...     head_learning_rate=0.04,
        ... )
        >>> arguments["learning_rate"], arguments["head_learning_rate"]
        (0.015, 0.005)
        >>> tx = mc.muonclip(**arguments)

    ??? cite "References"

        Qiu et al., "Hyperparameter Transfer Enables Consistent Gains of
        Matrix-Preconditioned Optimizers Across Scales", arXiv:2512.05620, for the
        scale of matrices; Yang et al., "Tensor Programs V", arXiv:2203.03466, Table 8,
        for the rate of the head; nanochat for that of the embedding. In
        arXiv:2512.05620 the rate of matrices stays and their decay falls with the
        width, so that their product falls, as it does here. The cube root is
        measured: it halves that product from width 32 to 256, where a quarter (code)
        and 0.7 of it (prose) were best.
    """
    number("width", width, POSITIVE)
    number("tuned_at", tuned_at, POSITIVE)
    check_rates(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        adam_learning_rate=adam_learning_rate,
        adam_weight_decay=adam_weight_decay,
        head_learning_rate=head_learning_rate,
    )
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    if adam_weight_decay is None:
        adam_weight_decay = weight_decay
    if head_learning_rate is None:
        head_learning_rate = adam_learning_rate
    ratio = tuned_at / width
    return dict(
        learning_rate=_scaled(learning_rate, ratio ** (1 / 3)),
        consistent_rms="mup",
        weight_decay=weight_decay,
        adam_learning_rate=_scaled(adam_learning_rate, math.sqrt(ratio)),
        adam_weight_decay=adam_weight_decay,
        head_learning_rate=_scaled(head_learning_rate, ratio),
    )


def _scaled(value: optax.ScalarOrSchedule, factor: float) -> optax.ScalarOrSchedule:
    if callable(value):
        return lambda count: factor * value(count)
    return factor * value

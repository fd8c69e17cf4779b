"""Labels and masks of params: what each leaf is, for the wrappers of optax."""

from __future__ import annotations  # help() shows aliases by name

from typing import Any

from .._calls import explained
from .._parameters import paths
from .._parameters.dimension_numbers import DimensionNumbers
from .._parameters.fit import check_params
from .knowledge import knowledge_of
from .model_reading import ModelReading


@explained
def matrix_mask(
    params: Any,
    *,
    model: ModelReading | None = None,
    dimension_numbers: DimensionNumbers | None = None,
) -> Any:
    """Returns a tree of bools: `True` for each leaf that Muon should update.

    **Arguments:**

    - `params`: as for [`param_labels`][].
    - `model`: as for [`scale_by_muon`][].
    - `dimension_numbers`: as for [`scale_by_muon`][].

    **Returns:** a tree like `params` of bools, for `optax.masked`.

    **Raises:** `ValueError` as [`flax_dimension_numbers`][] does.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.matrix_mask({"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}})
        {'up': {'bias': False, 'kernel': True}}
    """
    check_params("matrix_mask(params)", params)
    tree = paths.flatten(paths.params_of(params))
    knowledge = knowledge_of(model, None, dimension_numbers)
    numbers = [verdict.numbers for verdict in knowledge.verdicts(tree)]
    return tree.unflatten(x is not None and not paths.is_masked(x) for x in numbers)


@explained
def param_labels(
    params: Any,
    *,
    model: ModelReading | None = None,
    dimension_numbers: DimensionNumbers | None = None,
) -> Any:
    """Returns a tree of labels that say what each leaf is, for `optax.partition`.

    | label | leaf |
    |---|---|
    | `"matrix"` | holds matrices, which are Muon's in [`muon`][] |
    | `"embedding"` | is looked up |
    | `"head"` | produces the output |
    | `"router"` | picks experts |
    | `"vector"` | norms, biases, gains, positions, and all else |
    | `"frozen"` | has no gradient on any path to the output, as a `model` shows |

    [`muon`][] does not change frozen leaves, and uses AdamW for the other ones.

    **Arguments:**

    - `params`: as for [`flax_dimension_numbers`][], or a module of NNX or Equinox.
    - `model`: as for [`scale_by_muon`][].
    - `dimension_numbers`: as for [`scale_by_muon`][].

    **Returns:** a tree like `params` of strings; hidden leaves stay hidden. For a
    module it is a tree like the params of its optimizer:
    `nnx.state(module, nnx.Param)`, or `eqx.filter(module, eqx.is_inexact_array)`.

    **Raises:** `ValueError` as [`flax_dimension_numbers`][] does.

    !!! example "A learning rate of its own for the output head"

        >>> import jax, jax.numpy as jnp, optax
        >>> import muonclip_jax as mc
        >>> kernels = {"embed": (32, 8), "up": (8, 16), "lm_head": (8, 32)}
        >>> params = {k: {"kernel": jnp.ones(shape)} for k, shape in kernels.items()}
        >>> mc.param_labels(params)["lm_head"]
        {'kernel': 'head'}
        >>> def is_head(params):
        ...     name = lambda label: "head" if label == "head" else "rest"
        ...     return jax.tree.map(name, mc.param_labels(params))
        >>> head = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)
        >>> tx = optax.partition({"rest": mc.muon(1e-2), "head": head}, is_head)
    """
    check_params("param_labels(params)", params)
    tree = paths.flatten(paths.params_of(params))
    knowledge = knowledge_of(model, None, dimension_numbers)
    return tree.unflatten(knowledge.labels(tree))

"""Query and key that are normalised: QK-Clip on the gains of their norms."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._parameters.stacks import IN_FRONT, StackAxes
from .attention_layers import AttentionLayer
from .head_leaf import HeadLeaf
from .modules_with import Finder, finder, Module


#: What libraries call the gain and the shift of a norm, below it.
_GAINS = ("scale", "weight", "w", "gamma", "gain")
_SHIFTS = ("bias", "b", "offset", "beta")


def normalised_attention(
    *,
    query: str = "query_ln",
    key: str = "key_ln",
    stack_axes: StackAxes = IN_FRONT,
) -> Finder:
    """Query and key that are normalised after their projection (`normalize_qk=True`).

    Scaling the projections does nothing there; scaling the gains of the norms does, and
    exactly, rotary embeddings included. The heads of a layer share the gains and are
    clipped together, by the largest of their logits. Gains that are stored as the
    difference from one, as in Gemma, do not scale so.

    **Arguments:**

    - `query`, `key`: names of the two norms; their gain is clipped (`scale`, `weight`,
        `w`, ..., or the norm itself where it is an array), and their bias if they have
        one.
    - `stack_axes`: as for [`flax_attention_layers`][].

    **Returns:** a function from params to a list of [`AttentionLayer`][], for
    `attention=`.

    **Raises:** `ValueError`, from the function returned, where it finds no layer, and
    where arrays are at hand and a gain is zero throughout, so that it can only be a
    difference from one.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> norm = {"scale": jnp.ones(2)}
        >>> params = {"attn": {"query_ln": norm, "key_ln": norm}}
        >>> stats = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
        >>> after = mc.clip_qk(params, stats, attention=mc.normalised_attention())
        >>> after["attn"]["query_ln"]["scale"]
        Array([0.5, 0.5], dtype=float32)
    """

    def layer(module: Module) -> AttentionLayer:
        return AttentionLayer(
            str(module), _leaves_of_norm(module, query), _leaves_of_norm(module, key)
        )

    return finder(tuple(_named(query, (*_GAINS, ""))), layer, stack_axes)


def _leaves_of_norm(module: Module, norm: str) -> tuple[HeadLeaf, ...]:
    gains = [name for name in _named(norm, (*_GAINS, "")) if module.has(name)][:1]
    shifts = [name for name in _named(norm, _SHIFTS) if module.has(name)][:1]
    if any(_is_zero(module.leaf(gain)) for gain in gains):
        raise ValueError(
            f"the gain '{module.show(gains[0])}' is zero throughout, so it must be "
            "stored as a difference from one, as in Gemma. Scaling it does not scale "
            "the logits, so QK-Clip cannot act there; use mc.muon"
        )
    return tuple(HeadLeaf(name, 1, axis=None) for name in (*gains, *shifts))


def _named(norm: str, leaves: Iterable[str]) -> Iterable[str]:
    return (f"{norm}/{leaf}" if leaf else norm for leaf in leaves)


def _is_zero(leaf: Any) -> bool:
    """Whether an array that is at hand has no entry but zero."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
        return False
    here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    # As NumPy's: `np.any` calls `leaf.any()`, which JAX traces where `init` is traced.
    return here and leaf.size > 0 and not np.any(np.asarray(leaf))

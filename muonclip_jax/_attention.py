"""Attention that records its largest logits, for Linen and NNX."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ._attention_stats import STATISTIC


def max_logits(
    query: jax.Array,
    key: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    r"""The largest value that enters the softmax, per head.

    $$S_h = \max_{b,i,j} \; s\, q_{bih} \cdot k_{bjh} + \mathrm{bias}_{bhij}$$

    over the pairs that the mask shows.

    **Arguments:**

    - `query`: `(batch..., length, heads, head_dim)`, after any rotary embedding.
    - `key`: `(batch..., key_length, key_heads, head_dim)`, where `key_heads` divides
        `heads`.
    - `bias`, `mask`: broadcast to `(batch..., heads, length, key_length)`; the mask is
        true (or nonzero) where a query sees a key.
    - `is_causal`: whether a query sees no later key.
    - `scale`: `1/sqrt(head_dim)` by default.

    **Returns:** `(heads,)` float32, without gradient; `-inf` for a head that sees
    nothing.

    **Raises:** `ValueError` where heads or sizes of query and key do not fit.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> mc.max_logits(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4)))
        Array([2., 2.], dtype=float32)
    """
    logits = _logits(*jax.lax.stop_gradient((query, key)), scale)
    if bias is not None:
        logits = logits + jax.lax.stop_gradient(bias)
    visible = None if mask is None else jnp.asarray(mask, bool)
    if is_causal:
        causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        visible = causal if visible is None else visible & causal
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    others = tuple(axis for axis in range(logits.ndim) if axis != logits.ndim - 3)
    return jnp.max(logits, axis=others, initial=-jnp.inf).astype(jnp.float32)


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: nn.Module | nnx.Module | None = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Flax attention that also sows `max_logits` beside its `query` and `key`.

    Give it as `attention_fn` to `flax.linen.MultiHeadDotProductAttention` or
    `flax.nnx.MultiHeadAttention` and call the layer with `sow_weights=True`, which is
    what hands `module` over; without it this is Flax's attention and nothing more. The
    statistic, `(heads,)` float32 as from [`max_logits`][], goes to the `intermediates`
    of Linen or to `nnx.Intermediate`; calls of a layer used twice combine by maximum.

    Linen passes only the arguments it finds in this signature, so they are spelled out.

    !!! example

        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> layer = nn.MultiHeadDotProductAttention(2, attention_fn=mc.attention_fn)
        >>> x = jnp.ones((1, 3, 8))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> y, recorded = layer.apply(
        ...     variables, x, sow_weights=True, mutable=["intermediates"]
        ... )
        >>> recorded["intermediates"]["max_logits"].shape
        (2,)
    """
    if module is not None:
        statistic = max_logits(query, key, bias=bias, mask=mask, is_causal=is_causal)
        _sow(module, statistic)
    common: dict[str, Any] = dict(
        bias=bias,
        mask=mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        dtype=dtype,
        precision=precision,
    )
    only_linen_can = (
        force_fp32_for_softmax
        or qk_attn_weights_einsum is not None
        or attn_weights_value_einsum is not None
    )
    # NNX's attention drops the precision and wants full masks for several batch axes;
    # Linen's has neither causal masks nor shared keys.
    linen_can = not is_causal and query.shape[-2] == key.shape[-2]
    if only_linen_can or (linen_can and (precision is not None or query.ndim > 4)):
        return nn.dot_product_attention(
            query,
            key,
            value,
            **common,
            force_fp32_for_softmax=force_fp32_for_softmax,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
    return nnx.dot_product_attention(query, key, value, **common, is_causal=is_causal)


def _logits(query: jax.Array, key: jax.Array, scale: float | None) -> jax.Array:
    """Returns `(batch..., heads, length, key_length)` in float32."""
    heads, key_heads, depth = query.shape[-2], key.shape[-2], query.shape[-1]
    if heads % key_heads or depth != key.shape[-1]:
        raise ValueError(
            f"query {query.shape} and key {key.shape} do not fit: key heads must "
            "divide query heads and both need the same head_dim"
        )
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, depth)
    # Spelled as in jax.nn.dot_product_attention, so that XLA computes both once.
    product = functools.partial(
        jnp.einsum, "...tnh,...snh->...nts", preferred_element_type=jnp.float32
    )
    logits = jax.vmap(lambda q: product(q, key), in_axes=-2, out_axes=-3)(grouped)
    logits = logits.reshape(*query.shape[:-3], heads, *logits.shape[-2:])
    return logits * (depth**-0.5 if scale is None else scale)


def _sow(module: nn.Module | nnx.Module, statistic: jax.Array) -> None:
    fold: dict[str, Any] = dict(reduce_fn=jnp.maximum, init_fn=lambda: -jnp.inf)
    if isinstance(module, nnx.Module):
        # Outside nnx.capture the value stays on the module, and the maximum with
        # last step's logits would clip the head again and again, down to zero.
        if isinstance(getattr(module, STATISTIC, None), nnx.Variable):
            raise ValueError(
                f"{type(module).__name__} still holds the max_logits of an earlier "
                "call: run the model under nnx.capture(..., nnx.Intermediate), or take "
                "them off after every step with nnx.pop(model, nnx.Intermediate)"
            )
        module.sow(nnx.Intermediate, STATISTIC, statistic, **fold)
    else:
        module.sow("intermediates", STATISTIC, statistic, **fold)

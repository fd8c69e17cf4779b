"""Attention that records its largest logits, for Linen and NNX."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .._model.statistics import STATISTIC
from .._options import check_function_or_none
from .logits import logits_and_values, make_window
from .max_logits import in_blocks, statistic


#: Maps query, key, value and options to output and statistic.
AttentionKernel = Callable[..., tuple[jax.Array, jax.Array]]


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
    kernel: AttentionKernel | None = None,
) -> jax.Array:
    """Computes Flax attention, and sows `max_logits` next to its `query` and `key`.

    Pass it as `attention_fn` to `flax.linen.MultiHeadDotProductAttention` or
    `flax.nnx.MultiHeadAttention` and call the layer with `sow_weights=True`, which
    makes Flax pass `module`; otherwise this is only Flax's attention. The statistic,
    `(heads,)` float32 as from [`max_logits`][], is sown into `intermediates` in Linen
    and `nnx.Intermediate` in NNX. A layer that is called twice has the maximum of both.

    **Arguments:**

    - `kernel`: a function that returns `(output, max_logits)` in place of Flax, such as
        [`blockwise_attention`][] and [`splash_attention`][]. Its arguments are query,
        key and value, and the layer's `bias`, `mask` and `is_causal` if given. Bind it
        with `functools.partial(mc.attention_fn, kernel=mc.blockwise_attention)`. The
        layer's `precision` and `force_fp32_for_softmax` do not reach it.
    - all others: as Flax passes them; query `(batch..., length, heads, head_dim)`,
        key and value `(batch..., key_length, key_heads, head_dim)`.

    **Returns:** the output of attention, `(batch..., length, heads, head_dim)`, in the
    dtype that Flax gives it.

    **Raises:** `ValueError` if an NNX module still holds the statistics of an earlier
    call, and for a layer with dropout or einsums together with a `kernel`.

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

    ??? cite "References"

        Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1.
    """
    check_function_or_none("kernel", kernel)
    if kernel is not None:
        einsums = qk_attn_weights_einsum or attn_weights_value_einsum
        if einsums or (dropout_rate > 0 and not deterministic):
            raise ValueError(
                "kernel= computes attention by itself, without the dropout and the "
                "einsums of the layer: leave those out, or leave out kernel="
            )
        arrays = [x if dtype is None else x.astype(dtype) for x in (query, key, value)]
        options: dict[str, Any] = {} if bias is None else dict(bias=bias)
        if mask is not None:
            options["mask"] = jnp.asarray(mask, bool)  # Flax's masks are numbers
        if is_causal:
            # Passed only if true, so that a kernel may lack the argument.
            options["is_causal"] = is_causal
        output, max_logits = kernel(*arrays, **options)
        if module is not None:
            _sow(module, max_logits)
        return output
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
    of_linen: dict[str, Any] = dict(
        force_fp32_for_softmax=force_fp32_for_softmax,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    # No **options in the signature, since Linen passes only arguments that it names.
    # NNX's attention (Flax 0.12) drops the precision on its way to jax.nn, computes the
    # softmax in float32 even for float64, and needs full masks for several batch axes.
    # Linen's has none of these faults, but forms all logits itself.
    is_double = jnp.result_type(query if dtype is None else dtype) == jnp.float64
    by_linen = precision is not None or query.ndim > 4 or is_double
    by_linen = by_linen or any(of_linen.values())
    if module is not None:
        # These are the same logits a second time. If Flax calls jax.nn, our einsum is
        # the same as there, and XLA computes the product once for both.
        shaped = (_of_rank(query.ndim, bias), _of_rank(query.ndim, mask))
        window = make_window(is_causal, None)
        logits, _ = logits_and_values(query, key, [], *shaped, None, None, None, window)
        by_jax = not by_linen and dropout_rate == 0
        _sow(module, statistic(logits if by_jax else in_blocks(logits)))
    if by_linen:
        # Linen's attention knows no shared keys and no causal masks.
        group = query.shape[-2] // key.shape[-2]
        if group > 1:
            key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
        if is_causal:
            causal = jnp.tri(query.shape[-3], key.shape[-3], dtype=bool)
            causal = causal[(None,) * (query.ndim - causal.ndim)]
            mask = causal if mask is None else jnp.logical_and(mask, causal)
        common["mask"] = mask
        return nn.dot_product_attention(query, key, value, **common, **of_linen)
    # For short dtypes jax.nn computes the softmax in float32. This mixes dtypes, which
    # is an error if the caller uses strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return nnx.dot_product_attention(
            query, key, value, **common, is_causal=is_causal
        )


def _of_rank(rank: int, x: jax.Array | None) -> jax.Array | None:
    """Removes the leading axes of size one that `jax.nn` needs from a mask or bias."""
    if x is None or set(x.shape[:-rank]) != {1}:
        return x
    return x.reshape(x.shape[-rank:])


def _sow(module: nn.Module | nnx.Module, statistic: jax.Array) -> None:
    # A plain sow appends to a tuple. With a maximum, a layer that is called twice has
    # one statistic, in the shape that nn.scan and nn.remat stack.
    fold: dict[str, Any] = dict(reduce_fn=jnp.maximum, init_fn=lambda: -jnp.inf)
    if isinstance(module, nnx.Module):
        # Outside nnx.capture the value stays on the module. The maximum with the last
        # step's logits would clip the head again and again, down to zero.
        if isinstance(getattr(module, STATISTIC, None), nnx.Variable):
            raise ValueError(
                f"{type(module).__name__} still holds the max_logits of an earlier "
                "call: run the model under nnx.capture(..., nnx.Intermediate), or "
                "remove them after every step with nnx.pop(model, nnx.Intermediate)"
            )
        module.sow(nnx.Intermediate, STATISTIC, statistic, **fold)
    else:
        module.sow("intermediates", STATISTIC, statistic, **fold)

"""Computes attention and its largest logits with tokamax's splash kernel on TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .._mesh_axes import manual_axes
from .._model.statistics import keep_nan, largest, STATISTIC
from .._options import check_whole_number
from .logits import fitting, make_window, scalar, segments, Window


_LANES = 128  # of a TPU's vector registers; blocks and lengths are multiples of it

# For a row that sees nothing, the kernel writes its DEFAULT_MASK_VALUE, -0.7 times the
# largest float32 (-2.4e38), divided by log2(e) with use_base2_exp. No logit comes near.
_NOTHING = -1e37


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    block_size: int = 512,
    interpret: bool = False,
    **config: Any,
) -> tuple[jax.Array, jax.Array]:
    """Computes splash attention on TPU, and the largest logits it keeps for gradients.

    The statistic, as in [`max_logits`][], costs nothing in training, because the kernel
    forms the row maxima anyway. Needs tokamax (`pip install 'muonclip_jax[tokamax]'`).
    Under `jit` with sharded arrays wrap the call in
    `jax.shard_map(..., check_vma=False)`, like any Pallas kernel.

    **Arguments:**

    - `query`, `key`, `value`: `(batch..., length, heads, head_dim)`; key heads divide
        the query's. Lengths are padded to a multiple of 128.
    - `is_causal`, `scale`, `local_window_size`, `query_segment_ids`, `key_segment_ids`:
        as for [`max_logits`][]. The kernel does not support mask arrays and additive
        biases.
    - `block_size`: largest number of queries and of keys in a block.
    - `interpret`: runs on any device, slowly, for tests.
    - `config`: further fields of tokamax's `SplashConfig`, such as
        `dq_reduction_steps=3`, which saves memory at long lengths.

    **Returns:** the output and the statistic, `(heads,)` float32 without gradient. In
    bfloat16 the kernel rounds the scaled query, and the statistic with it, to about
    0.3 % (0.1 % with `use_base2_exp=False`).

    **Raises:** `ValueError` for `logits_soft_cap`, since the kernel keeps the maxima of
    the capped logits; for arrays that do not fit, float64 and axes of size zero; and
    for arrays on a mesh outside such a `shard_map`. `ImportError` without tokamax.

    !!! example

        >>> import functools
        >>> import muonclip_jax as mc
        >>> kernel = functools.partial(mc.splash_attention, is_causal=True)
        >>> attention_fn = functools.partial(mc.attention_fn, kernel=kernel)

    ??? cite "References"

        Dao et al., "FlashAttention", arXiv:2205.14135. Splash attention is its form for
        TPU and sparse masks.
    """
    if logits_soft_cap is not None:
        raise ValueError(
            "splash_attention records the capped logits under logits_soft_cap, and "
            "QK-Clip cannot scale those to the threshold; leave the cap out, since "
            "QK-Clip already bounds the logits"
        )
    shape, arrays = fitting(query, key, value)
    query, key, value = arrays
    if any(0 in x.shape or x.dtype == jnp.float64 for x in arrays):
        given = ", ".join(f"{x.dtype} {x.shape}" for x in arrays)
        raise ValueError(
            f"splash_attention takes no float64 and no axis of size zero, got {given}; "
            "use blockwise_attention"
        )
    if any(manual_axes(x) or jax.typeof(x).sharding.mesh.explicit_axes for x in arrays):
        raise ValueError(
            "splash_attention is a Pallas kernel, and the types of its results do not "
            "say how they are sharded: call it in jax.shard_map(..., check_vma=False)"
        )
    window = make_window(is_causal, local_window_size)
    block_size = check_whole_number("block_size", block_size, 1)
    ids = segments(query_segment_ids, key_segment_ids, shape)
    batch, (length, key_length) = query.shape[:-1], shape[-2:]
    padded = _padded(length), _padded(key_length)
    splash = _tokamax()
    rows, columns = (_largest_block(size, block_size) for size in padded)
    # Forward and both halves of the gradient use the same blocks. The caller may tune
    # any other field of tokamax's config.
    blocks = dict(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns
    )
    kernel = splash.make_splash_mha(
        _mask(splash.mask_lib, padded, window),
        config=splash.SplashConfig(**blocks | config | {"interpret": interpret}),
        save_residuals=True,
        q_seq_shards=1,
    )
    # The kernel has no scale argument, so scale the query.
    factor = scalar(scale, query.shape[-1], jnp.float32)
    scaled = (query.astype(jnp.float32) * factor).astype(query.dtype)
    # From (batch..., length, heads, dim) to (batch, heads, padded length, dim).
    arguments = [
        _pad(jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2), -2)
        for x in (scaled, key, value)
    ]
    if ids[0] is None and padded[1] > key_length:
        ids = (jnp.zeros((*batch[:-2], n), jnp.int32) for n in shape[-2:])
    rows_of_ids = [x.reshape(-1, x.shape[-1]) for x in ids if x is not None]
    if rows_of_ids:
        # Padded keys get a segment that no query has.
        nowhere = jnp.min(rows_of_ids[0]) - 1
        of_rows = (_pad(x, -1, nowhere) for x in rows_of_ids)
        arguments.append(splash.SegmentIds(*of_rows))
    output, residuals = jax.vmap(kernel)(*arguments)
    # The kernel skips blocks whose queries see no key.
    before, after = (max(padded) if side is None else side for side in window)
    queries = np.arange(length)
    seen = jnp.asarray(
        np.maximum(queries - before, 0) <= np.minimum(queries + after, key_length - 1)
    )
    maxima = keep_nan(residuals["max_logits"], jnp.isnan(residuals["logsumexp"]))
    # The kernel does not write rows that see no key; they may hold anything, even NaN.
    output = jnp.swapaxes(output[:, :, :length], 1, 2)
    output = jnp.where(seen[None, :, None, None], output, 0)
    # The name lets `record_attention` find it, although the loss does not return it.
    statistic = checkpoint_name(_statistic(maxima, seen), STATISTIC)
    return output.reshape(*batch, output.shape[-1]), statistic


def _statistic(row_maxima: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the `(heads,)` maxima of `(batch, heads, padded length)`."""
    maxima = row_maxima[..., : seen.size]
    # Segments may hide all keys from a row that the window lets see some.
    is_hidden = ~seen[None, None] | (maxima <= _NOTHING)
    maxima = jnp.where(is_hidden, -jnp.inf, maxima)
    return jax.lax.stop_gradient(largest(maxima, (0, 2)))


def _tokamax() -> Any:
    try:
        # Private, so pyproject.toml has an upper bound. The public API of 0.0.17 takes
        # neither a mask that the kernel computes nor `interpret`.
        from tokamax._src.ops.experimental.tpu.splash_attention import (  # pyright: ignore[reportMissingImports]
            splash_attention_kernel,
        )
    except ImportError as error:
        raise ImportError(
            "splash_attention needs tokamax: pip install 'muonclip_jax[tokamax]'"
        ) from error
    return splash_attention_kernel


@functools.cache
def _mask(masks: Any, shape: tuple[int, int], window: Window) -> Any:
    """Returns a mask that the kernel computes, without an array of both lengths.

    Cached by shape: each mask has a function of its own, for which `jit` would compile.
    """
    before, after = (
        None if side is None or side >= max(shape) - 1 else side for side in window
    )
    if before is None and after is None:
        return masks.FullMask(shape)
    return masks.LocalMask(shape, (before, after), 0)


def _pad(x: jax.Array, axis: int, value: Any = 0) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, _padded(x.shape[axis]) - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def _padded(length: int) -> int:
    return -(-length // _LANES) * _LANES


def _largest_block(length: int, limit: int) -> int:
    # The kernel needs a block that divides the length: for 640, at most 512, it is 128.
    blocks = range(_LANES, min(length, max(limit, _LANES)) + 1, _LANES)
    return max(block for block in blocks if length % block == 0)

"""Attention and its largest logits from tokamax's splash kernel on TPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from .._axes import manual_axes
from .._model.statistics import largest, STATISTIC
from .._options import whole_number
from .logits import fitting, make_window, scalar, segments


_LANES = 128  # of a TPU's vector registers, of which blocks and lengths are multiples

# Where nothing is seen the kernel writes its DEFAULT_MASK_VALUE, -0.7 times the largest
# float32 (-2.4e38), over log2(e) with use_base2_exp. No logit comes near.
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
    """Splash attention on TPU, and the largest logits that it keeps for its gradient.

    The statistic, as [`max_logits`][] defines it, costs nothing in training: the kernel
    forms the row maxima anyway. Needs tokamax (`pip install 'muonclip_jax[tokamax]'`).
    Under `jit` with sharded arrays wrap the call in `jax.shard_map(...,
    check_vma=False)`, as any Pallas kernel.

    **Arguments:**

    - `query`, `key`, `value`: `(batch..., length, heads, head_dim)`; key heads divide
        the query's. Lengths are padded to a multiple of 128.
    - `is_causal`, `scale`, `local_window_size`, `query_segment_ids`,
        `key_segment_ids`: as for [`max_logits`][]. Arrays as masks and additive biases
        are beyond this kernel.
    - `block_size`: largest number of queries and of keys in a block.
    - `interpret`: runs on any device, slowly, for tests.
    - `config`: further fields of tokamax's `SplashConfig`, such as
        `dq_reduction_steps=3`, which saves memory at long lengths.

    **Returns:** the output and the statistic, `(heads,)` float32 without gradient. In
    bfloat16 the kernel rounds the scaled query, and the statistic with it, to about
    0.3 % (0.1 % with `use_base2_exp=False`).

    **Raises:** `ValueError` for `logits_soft_cap`: the maxima of the kernel are those
    of the capped logits; for arrays that do not fit, float64 and axes of size zero; and
    for arrays on a mesh outside such a `shard_map`. `ImportError` without tokamax.

    !!! example

        >>> import functools
        >>> import muonclip_jax as mc
        >>> kernel = functools.partial(mc.splash_attention, is_causal=True)
        >>> attention_fn = functools.partial(mc.attention_fn, kernel=kernel)

    ??? cite "References"

        Dao et al., "FlashAttention", arXiv:2205.14135, of which splash attention is a
        form for TPU and sparse masks.
    """
    if logits_soft_cap is not None:
        raise ValueError(
            "splash_attention records the capped logits under logits_soft_cap, and no "
            "scaling of the weights brings those to the threshold; without the cap, "
            "QK-Clip bounds the logits by itself"
        )
    shape, arrays = fitting(query, key, value)
    query, key, value = arrays
    if any(0 in x.shape or x.dtype == jnp.float64 for x in arrays):
        given = ", ".join(f"{x.dtype} {x.shape}" for x in arrays)
        raise ValueError(
            f"splash_attention takes no float64 and no axis of size zero: {given}; "
            "blockwise_attention does"
        )
    if any(manual_axes(x) or jax.typeof(x).sharding.mesh.explicit_axes for x in arrays):
        raise ValueError(
            "splash_attention is a Pallas kernel, whose results have no type that says "
            "how a mesh shards them: call it in jax.shard_map(..., check_vma=False)"
        )
    window = make_window(is_causal, local_window_size)
    block_size = whole_number("block_size", block_size, 1)
    ids = segments(query_segment_ids, key_segment_ids, shape)
    length, batch = query.shape[-3], query.shape[:-1]
    padded = _padded(length), _padded(key.shape[-3])
    before, after = (max(padded) if side is None else side for side in window)
    band = _Band(padded, key.shape[-3], before, after)
    splash = _tokamax()
    rows, columns = (_largest_block(size, block_size) for size in band.shape)
    # Forward and both halves of the gradient in the same blocks: any other field of
    # tokamax's config is for the caller to tune.
    blocks = dict(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns
    )
    kernel = splash.make_splash_mha(
        splash.mask_lib.FullMask(band.shape) if band.is_full else band,
        config=splash.SplashConfig(**blocks | config | {"interpret": interpret}),
        save_residuals=True,
        q_seq_shards=1,
    )
    # The kernel knows no scale: the query has to bring it.
    factor = scalar(scale, query.shape[-1], jnp.float32)
    scaled = (query.astype(jnp.float32) * factor).astype(query.dtype)
    # From (batch..., length, heads, dim) to (batch, heads, padded length, dim).
    arguments = [
        _pad(jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2), -2)
        for x in (scaled, key, value)
    ]
    if ids[0] is not None:
        rows_of_ids = (_pad(x.reshape(-1, x.shape[-1]), -1) for x in ids)
        arguments.append(splash.SegmentIds(*rows_of_ids))
    output, residuals = jax.vmap(kernel)(*arguments)
    seen = jnp.asarray(band.rows_that_see(length))
    # A maximum may lose a NaN, but the sum does not.
    is_nan = jnp.isnan(residuals["logsumexp"])
    maxima = jnp.where(is_nan, jnp.nan, residuals["max_logits"])
    # Rows that see no key are left unwritten, which may be anything, NaN included.
    output = jnp.swapaxes(output[:, :, :length], 1, 2)
    output = jnp.where(seen[None, :, None, None], output, 0)
    # By its name `record_attention` finds it, though a loss does not return it.
    statistic = checkpoint_name(_statistic(maxima, seen), STATISTIC)
    return output.reshape(*batch, output.shape[-1]), statistic


def _statistic(row_maxima: jax.Array, seen: jax.Array) -> jax.Array:
    """The `(heads,)` maxima of `(batch, heads, padded length)`."""
    maxima = row_maxima[..., : seen.size]
    # Segments hide all keys from a row of a batch where the band shows some.
    is_hidden = ~seen[None, None] | (maxima <= _NOTHING)
    maxima = jnp.where(is_hidden, -jnp.inf, maxima)
    return jax.lax.stop_gradient(largest(maxima, (0, 2)))


def _tokamax() -> Any:
    try:
        # Private, so that pyproject.toml has an upper bound. What 0.0.17 exports takes
        # neither a mask that the kernel computes nor `interpret`.
        from tokamax._src.ops.experimental.tpu.splash_attention import (  # pyright: ignore[reportMissingImports]
            splash_attention_kernel,
        )
    except ImportError as error:
        raise ImportError(
            "splash_attention needs tokamax: pip install 'muonclip_jax[tokamax]'"
        ) from error
    return splash_attention_kernel


@dataclasses.dataclass(frozen=True)
class _Band:
    """The keys that each query sees, as a mask that splash computes in its kernel.

    A table of booleans would be an array of length x key_length on the host.
    """

    shape: tuple[int, int]  # padded
    keys: int  # those that are no padding
    before: int
    after: int

    # Tokamax asks a mask for `shape`, `q_sequence`, `mask_function` and slices.
    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.shape[0], dtype=np.int32)

    @property
    def mask_function(self):
        # Bound methods of equal bands are equal, so that jit finds its program again; a
        # function made here would compile one in each call.
        return self.visible

    def visible(self, rows: Any, columns: Any) -> Any:
        mask = (columns < self.keys) & (rows >= 0)
        # The kernel compares in every tile: not what always holds.
        if self.before < self.shape[0]:
            mask = mask & (rows - columns <= self.before)
        if self.after < self.shape[1]:
            mask = mask & (columns - rows <= self.after)
        return mask

    def __getitem__(self, index) -> np.ndarray:
        rows, columns = (
            np.arange(n)[i] for n, i in zip(self.shape, index, strict=True)
        )
        return self.visible(rows[:, None], columns[None, :])

    @property
    def is_full(self) -> bool:
        """True where nothing is hidden, for which splash has no computed mask."""
        rows, columns = self.shape
        reaches_all = self.before >= rows - 1 and self.after >= columns - 1
        return self.keys == columns and reaches_all

    def rows_that_see(self, queries: int) -> np.ndarray:
        """True for each query that sees a key; the kernel skips the others' blocks."""
        i = np.arange(queries)
        return np.maximum(i - self.before, 0) <= np.minimum(
            i + self.after, self.keys - 1
        )


def _pad(x: jax.Array, axis: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, _padded(x.shape[axis]) - x.shape[axis])
    return jnp.pad(x, widths)


def _padded(length: int) -> int:
    return -(-length // _LANES) * _LANES


def _largest_block(length: int, limit: int) -> int:
    # Of those that divide the length, as the kernel wants it: 640 at most 512 is 128.
    blocks = range(_LANES, min(length, max(limit, _LANES)) + 1, _LANES)
    return max(block for block in blocks if length % block == 0)

"""A copy of splash attention, as MaxText and EasyDeL keep one each, in one block.

As there: tables of a mask are in front of query, key and value, which have a length
after their heads and no batch; the scale is in the query; and the name of the kernel
has its options, so that what can be taught is the function that calls it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class MaskInfo(NamedTuple):
    block_mask: jax.Array
    q_sequence: jax.Array


class SegmentIds(NamedTuple):
    q: jax.Array
    kv: jax.Array


def _kernel(sequence, q_ids, kv_ids, q, k, v, out, *, mask_value):
    logits = jnp.dot(q[...], k[...].T)
    keys = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_seen = (sequence[...] >= keys) & (q_ids[...] == kv_ids[...])
    logits = jnp.where(is_seen, logits, mask_value)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    out[...] = jnp.dot(weights / weights.sum(-1, keepdims=True), v[...])


def _forward(info, q, k, v, segments, mask_value):
    heads, length, dim = q.shape
    row = pl.BlockSpec((1, length), lambda h: (0, 0))
    column = pl.BlockSpec((length, 1), lambda h: (0, 0))

    def of_heads(count):
        return pl.BlockSpec(
            (None, length, dim), lambda h: (h // (heads // count), 0, 0)
        )

    return pl.pallas_call(
        functools.partial(_kernel, mask_value=mask_value),
        grid=(heads,),
        in_specs=[column, column, row, *(of_heads(len(x)) for x in (q, k, v))],
        out_specs=of_heads(heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=True,
        name=f"splash_mha_fwd_segmented_no_residuals_block_q_{length}",
    )(info.q_sequence[:, None], segments.q[:, None], segments.kv[None], q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _splash_attention_custom(fwd_info, dkv_info, q, k, v, segment_ids, mask_value):
    del dkv_info
    return _forward(fwd_info, q, k, v, segment_ids, mask_value)


def _fwd(fwd_info, dkv_info, q, k, v, segments, mask_value):
    return _forward(fwd_info, q, k, v, segments, mask_value), (
        fwd_info,
        q,
        k,
        v,
        segments,
    )


def _bwd(mask_value, residuals, g):
    info, q, k, v, segments = residuals

    def plain(q, k, v):
        k, v = (jnp.repeat(x, len(q) // len(x), 0) for x in (k, v))
        is_seen = info.q_sequence[:, None] >= info.q_sequence
        is_seen &= segments.q[:, None] == segments.kv
        return jax.nn.softmax(jnp.where(is_seen, q @ k.mT, mask_value)) @ v

    return None, None, *jax.vjp(plain, q, k, v)[1](g), None


_splash_attention_custom.defvjp(_fwd, _bwd)


def make_splash_mha(length):
    """Causal attention of `(heads, length, dim)` within segments."""
    info = MaskInfo(jnp.ones((1, 1, 1), jnp.int8), jnp.arange(length))
    return jax.jit(
        lambda q, k, v, segment_ids: _splash_attention_custom(
            info, info, q, k, v, segment_ids, -1e30
        )
    )

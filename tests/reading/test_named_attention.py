"""Attention of well-known models: read, recorded to 1e-5, clipped to 1e-4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numbers import Case, largest, noted
from pieces_of_cases import array, B, cut, D, H, K, weights

import muonclip_jax as mc


def _check(fun, params, *args):
    reading = mc.read_model(fun, params, *args)
    assert len(reading.attention) == 1 and not reading.refused
    _, stats = jax.jit(mc.record_attention(fun))(params, *args)
    case = Case("", fun, params, args, "", "read")
    (row,), (found,) = largest(case, params), jax.tree.leaves(stats)
    np.testing.assert_allclose(found, row, rtol=1e-5)
    threshold = float(np.mean(row[row > 0]))
    clipped = mc.clip_qk(params, stats, threshold, model=reading)
    (after,) = largest(case, clipped)
    np.testing.assert_allclose(after, np.minimum(row, threshold), rtol=1e-4)


QKVO = weights(q=(D, D), k=(D, D), v=(D, D), o=(D, D))


def _logits(q, k):
    return jnp.einsum("...qhd,...khd->...hqk", q, k) * K**-0.5


def _written(p, x, y):
    return jnp.tanh(x + y.reshape(x.shape) @ p["o"])


@pytest.mark.more
def test_a_memory_of_transformer_xl():
    """Its keys are made of activations that the segment before left."""
    n, m = 4, 3

    def shifted(x):  # so that each query has its distances
        *batch, q, k = x.shape
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])
        return x.reshape(*batch, k + 1, q)[..., 1:, :].reshape(*batch, q, k)

    def fun(p, x, memory):
        both = jnp.concatenate([jax.lax.stop_gradient(memory), x], 1)
        q, k, v = cut(x @ p["q"]), cut(both @ p["k"]), cut(both @ p["v"])
        angle = jnp.arange(n + m)[::-1, None] / 10.0 ** jnp.arange(D // 2)
        places = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
        content = _logits(q + p["q_content"], k)
        place = _logits(q + p["q_place"], cut(places @ p["k_place"]))
        causal = np.tri(n, n + m, m, dtype=bool)
        logits = noted(jnp.where(causal, content + shifted(place), -1e30))
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
        return _written(p, x, y)

    more = weights(k_place=(D, D), q_content=(H, K), q_place=(H, K))
    x, memory = array("xl", B, n, D), array("memory of xl", B, m, D)
    _check(fun, QKVO | more, x, memory)


@pytest.mark.more
def test_block_banded_attention_of_gencast():
    """Blocks attend to themselves and both neighbors, under one maximum."""
    blocks, size = 3, 2

    def fun(p, x, masks):
        q, k, v = (cut(x @ p[name]) for name in "qkv")
        k, v = (jnp.pad(t, [(0, 0), (1, 1), *[(0, 0)] * 3]) for t in (k, v))
        near = [slice(1, -1), slice(2, None), slice(None, -2)]
        tiles = [
            noted(
                jnp.where(mask, _logits(q, k[:, at]), -1e30),
                layer="one",
                merge="largest",
            )
            for mask, at in zip(masks, near, strict=True)
        ]
        tops = [jax.lax.stop_gradient(t.max(-1, keepdims=True)) for t in tiles]
        top = jnp.stack(tops).max(0)
        e = [jnp.exp(t - top) for t in tiles]
        total = sum(t.sum(-1, keepdims=True) for t in e)
        y = sum(
            jnp.einsum("bnhqk,bnkhd->bnqhd", t / total, v[:, at])
            for t, at in zip(e, near, strict=True)
        )
        return _written(p, x, y)

    masks = np.ones((3, 1, blocks, 1, size, size), bool)
    masks[1, :, -1] = masks[2, :, 0] = masks[0, 0, 1, 0, 0, 1] = False
    _check(fun, QKVO, array("mesh", B, blocks, size, D), masks)

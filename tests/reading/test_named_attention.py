"""Attention of well-known models, in short: read, recorded and clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonclip_jax as mc


def octo_pooling(params, tokens, seen=lambda logits: None):
    """The action head of Octo: a probe attends to the readout tokens of a step."""
    y = jax.nn.standardize(tokens @ params["embed"])
    probe = jnp.broadcast_to(params["probe"], (*y.shape[:-2], 1, y.shape[-1]))
    query, key, value = (
        (x @ params["pool"][name]).reshape(*x.shape[:-1], 2, 8)
        for x, name in ((probe, "query"), (y, "key"), (y, "value"))
    )
    logits = jnp.einsum("...qhd,...khd->...hqk", query / 8**0.5, key)
    seen(logits)
    y = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(logits), value)
    y = y.reshape(*y.shape[:-2], -1) @ params["pool"]["out"]
    return jnp.mean((y[..., 0, :] @ params["action"]) ** 2)


def octo_params():
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    pool = {name: array(16, 16) / 2 for name in ("query", "key", "value", "out")}
    rest = {"embed": array(6, 16), "probe": array(1, 16), "action": array(16, 7)}
    return {"pool": pool, **rest}, array(2, 3, 1, 6)


def octo_largest(params, tokens):
    seen = []
    octo_pooling(params, tokens, seen.append)
    return np.asarray(seen[0], np.float64).max((0, 1, 3, 4))


@pytest.mark.parametrize("count", [1, 2])
def test_the_pooling_of_octo_over_its_readout_tokens(count):
    params, tokens = octo_params()
    tokens = jnp.concatenate([tokens, -tokens], 2)[:, :, :count]
    reading = mc.read_model(octo_pooling, params, tokens)
    assert not reading.refused
    (layer,) = reading.attention
    assert [x.path for x in (*layer.query, *layer.key)] == ["query", "key"]
    _, stats = mc.record_attention(octo_pooling)(params, tokens)
    before = octo_largest(params, tokens)
    np.testing.assert_allclose(stats["pool"]["max_logits"], before, rtol=1e-5)
    tau = float(before[before > 0].min() / 2)
    clipped = mc.clip_qk(params, stats, tau, model=reading)
    after = octo_largest(clipped, tokens)
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)

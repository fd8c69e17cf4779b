"""What the manual has in place of a transformation after the clip, and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal

import muonclip_jax as mc


THRESHOLD = 2.0


def loss(params, x):
    q, k, v = (jnp.einsum("td,dhk->htk", x, params[name]) for name in "qkv")
    return jnp.sum((jax.nn.softmax(q @ k.mT) @ v) ** 2)


PARAMS = {name: normal(i, 8, 2, 4, scale=0.6) for i, name in enumerate("qkv")}
X = normal(9, 6, 8)


@functools.cache
def reading():
    return mc.read_model(loss, PARAMS, X)


def muonclip():
    # Nothing but the clip changes the params, so that the logits after it are known.
    return mc.muonclip(0.0, threshold=THRESHOLD, model=reading())


def logits(params):
    return np.asarray(mc.record_attention(loss)(params, X)[1]["max_logits"])


def after(tx, steps=1):
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.value_and_grad(mc.record_attention(loss), has_aux=True)
    for _ in range(steps):
        (_, stats), grads = step(params, X)
        updates, state = tx.update(grads, state, params, attention_stats=stats)
        params = optax.apply_updates(params, updates)
    return logits(params)


# The statistic is computed in float32 of products of a few terms: some ulp of 1.2e-7.
def clipped():
    return np.minimum(logits(PARAMS), THRESHOLD)


@pytest.mark.parametrize(
    "ending, steps",
    [
        pytest.param(optax.apply_every(4), 4, id="apply_every"),
        pytest.param(optax.scale(0.5), 1, id="scale"),
        pytest.param(optax.clip_by_global_norm(0.1), 1, id="clip_by_global_norm"),
    ],
)
def test_what_comes_after_the_clip_spoils_it(ending, steps):
    assert (logits(PARAMS) > THRESHOLD).all()
    assert not np.allclose(after(optax.chain(muonclip(), ending), steps), clipped())


@pytest.mark.parametrize(
    "make, steps",
    [
        pytest.param(
            lambda: mc.multi_steps(muonclip(), 4, model=reading()), 4, id="multi_steps"
        ),
        pytest.param(
            lambda: optax.chain(optax.clip_by_global_norm(0.1), muonclip()),
            1,
            id="clip before",
        ),
        pytest.param(
            lambda: optax.chain(
                optax.scale(0.0), mc.qk_clip(threshold=THRESHOLD, model=reading())
            ),
            1,
            id="scale before",
        ),
    ],
)
def test_what_the_manual_has_instead_keeps_it(make, steps):
    np.testing.assert_allclose(after(make(), steps), clipped(), rtol=1e-5)

"""Weights come out as `clip_qk` gives them, whatever params and updates are made of."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal

import muonclip_jax as mc


DTYPES = ["float16", "bfloat16", "float32"]
# Heads left alone, clipped a little, and by factors that lead far below the old weight.
LOGITS = np.array([90.0, 100.5, 1e3, 1e5], np.float32)
STATS = {"a": {"max_logits": LOGITS}}


def tree(seed, dtype, scale=1.0):
    def leaf(*shape):
        return normal((seed, len(shape)), *shape, dtype=jnp.dtype(dtype), scale=scale)

    layer = {"kernel": leaf(6, 4, 5), "bias": leaf(4, 5)}
    return {"a": {"query": layer, "key": layer}, "b": {"kernel": leaf(3, 3)}}


@pytest.mark.parametrize("param, update", [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_as_the_function_on_params(param, update, alpha):
    params, updates = tree(0, param), tree(1, update, 1e-2)
    tx = mc.qk_clip(alpha=alpha)
    clipped, _ = jax.jit(tx.update)(
        updates, tx.init(params), params, attention_stats=STATS
    )
    moved = optax.apply_updates(params, updates)
    expected = mc.clip_qk(moved, STATS, alpha=alpha)
    actual = optax.apply_updates(params, clipped)
    chex.assert_trees_all_equal_dtypes(actual, params)
    # In float32 a sum keeps the last bit of the old weight, not of the new one.
    last_bit = jnp.finfo(param).eps * np.abs(params["a"]["query"]["kernel"]).max()
    rest = dict(rtol=1e-6, atol=float(last_bit) if param == "float32" else 0)
    chex.assert_trees_all_close(actual, expected, **rest)
    # The head under the threshold, and what carries no heads, bit for bit.
    for role in ("query", "key"):
        chex.assert_trees_all_equal(
            actual["a"][role]["kernel"][:, 0], moved["a"][role]["kernel"][:, 0]
        )
    chex.assert_trees_all_equal(clipped["b"], updates["b"])
    chex.assert_trees_all_equal_dtypes(clipped["b"], updates["b"])


@pytest.mark.parametrize("param", DTYPES)
def test_the_function_on_params_rounds_once(param):
    params = tree(0, param)["a"]
    after = mc.clip_qk({"a": params}, STATS)["a"]
    factors = np.sqrt(np.minimum(1, np.float32(100) / LOGITS).astype(np.float64))
    for role in ("query", "key"):
        exact = np.asarray(params[role]["kernel"], np.float64) * factors[:, None]
        actual = np.asarray(after[role]["kernel"], np.float64)
        eps = float(jnp.finfo(param).eps)
        tiny = float(jnp.finfo(param).smallest_subnormal)
        assert (np.abs(actual - exact) <= (eps / 2 + 1e-6) * np.abs(exact) + tiny).all()

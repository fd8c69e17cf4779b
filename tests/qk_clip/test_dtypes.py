"""`clip_qk` rounds once, whatever the params are made of."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import muonclip_jax as mc


DTYPES = ["float16", "bfloat16", "float32"]
# Heads left alone, clipped a little, and far below the old weight.
LOGITS = np.array([90.0, 100.5, 1e3, 1e5], np.float32)
STATS = {"a": {"max_logits": LOGITS}}


def tree(seed, dtype, scale=1.0):
    def leaf(*shape):
        return normal((seed, len(shape)), *shape, dtype=jnp.dtype(dtype), scale=scale)

    layer = {"kernel": leaf(6, 4, 5), "bias": leaf(4, 5)}
    return {"a": {"query": layer, "key": layer}, "b": {"kernel": leaf(3, 3)}}


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

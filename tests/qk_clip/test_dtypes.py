"""Clipped weights are rounded once, whatever params and updates are made of."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import more, normal

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


@pytest.mark.parametrize("alpha", [more(0.0), 0.5, more(1.0)])
@pytest.mark.parametrize(("param", "update"), list(itertools.product(DTYPES, DTYPES)))
def test_updates_lead_where_the_function_does(param, update, alpha):
    """Down to a thousandth of the old weight, where a short update has no digits."""
    params, updates = tree(0, param), tree(1, update, scale=1e-2)
    tx = mc.qk_clip(alpha=alpha)
    clipped, _ = tx.update(updates, tx.init(params), params, attention_stats=STATS)
    actual = optax.apply_updates(params, clipped)
    moved = jax.tree.map(
        lambda p, u: p.astype(jnp.float32) + u.astype(jnp.float32), params, updates
    )
    expected = mc.clip_qk(moved, STATS, alpha=alpha)
    eps = float(jnp.finfo(param).eps)
    tiny = float(jnp.finfo(param).smallest_subnormal)
    for role, leaf in itertools.product(("query", "key"), ("kernel", "bias")):
        assert actual["a"][role][leaf].dtype == param
        x = np.asarray(actual["a"][role][leaf], np.float64)
        y = np.asarray(expected["a"][role][leaf], np.float64)
        # A float32 sum rounds to 2**-24 of the old weight, a thousand times the new.
        assert (np.abs(x - y) <= (eps / 2 + 2e-4) * np.abs(y) + tiny + 1e-9).all()
    # What is not scaled keeps its dtype and its bits.
    assert clipped["b"]["kernel"].dtype == update
    np.testing.assert_array_equal(clipped["b"]["kernel"], updates["b"]["kernel"])


def test_a_layer_without_heads():
    empty = {"kernel": jnp.zeros((6, 0, 5))}
    params = {"a": {"query": empty, "key": empty}}
    stats = {"a": {"max_logits": jnp.zeros(0)}}
    tx = mc.qk_clip()
    _, state = tx.update(params, tx.init(params), params, attention_stats=stats)
    assert state.num_clipped == state.num_nonfinite == 0

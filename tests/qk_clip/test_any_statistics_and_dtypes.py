"""Clipped weights are rounded once, and each head gets its share and no more.

Whatever heads, statistics, params and updates there are.
"""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import more, normal
from hypothesis import given, settings
from hypothesis import strategies as st

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


STATISTICS = st.one_of(
    st.floats(-50, 2000, width=32),
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-40]),
    st.just("tau"),
)


@st.composite
def clips(draw):
    """Grouped queries of any size, with the statistics that a bad step may bring."""
    key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = key_heads * group
    tau = draw(st.floats(0.5, 500, width=32))
    drawn = draw(st.lists(STATISTICS, min_size=heads, max_size=heads))
    logits = np.asarray([tau if x == "tau" else x for x in drawn], np.float32)
    return key_heads, tau, draw(st.floats(0, 1, width=32)), logits


clip_qk = jax.jit(mc.clip_qk)


@settings(max_examples=60, deadline=None)
@given(clips())
def test_of_any_heads_and_statistics(clip):
    key_heads, tau, alpha, logits = clip
    heads = len(logits)
    query, key = np.ones((2, heads, 2), np.float32), np.ones((2, key_heads, 2))
    params = {
        "query": {"kernel": query, "bias": query[0]},
        "key": {"kernel": key.astype(np.float32)},
    }
    after = clip_qk(params, {"max_logits": logits}, tau, alpha=alpha)
    for leaf in jax.tree.leaves(after):
        assert np.isfinite(leaf).all()
    gamma = np.ones(heads)
    over = np.isfinite(logits) & (logits > tau)
    gamma[over] = tau / logits[over].astype(np.float64)
    factor = np.asarray(after["query"]["kernel"])[0, :, 0]
    shared = np.repeat(np.asarray(after["key"]["kernel"])[0, :, 0], heads // key_heads)
    np.testing.assert_allclose(factor * shared, gamma, rtol=1e-5, atol=1e-37)
    np.testing.assert_array_equal(after["query"]["bias"][:, 0], factor)
    # Of heads that do not exceed, not a bit changes.
    assert (factor[~over] == 1).all() and (shared[~over] == 1).all()
    again = clip_qk(
        after, {"max_logits": np.where(over, np.float32(tau), logits)}, tau, alpha=alpha
    )
    chex.assert_trees_all_equal(again, after)

"""Frozen gains of query and key: nothing scales logits that kernels still make grow."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import normal

import muonclip_jax as mc


X = normal(9, 2, 5, 8)
PARAMS = {
    "query": {"kernel": normal(0, 8, 2, 4), "gain": jnp.ones(4)},
    "key": {"kernel": normal(1, 8, 2, 4), "gain": jnp.ones(4)},
    "value": normal(2, 8, 2, 4),
}


def loss(params, x):
    def normalized(side):
        y = jnp.einsum("btd,dhk->bthk", x, side["kernel"])
        return y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True)) * side["gain"]

    value = jnp.einsum("btd,dhk->bthk", x, params["value"])
    query, key = (normalized(params[name]) for name in ("query", "key"))
    return jnp.mean(jax.nn.dot_product_attention(query, key, value) ** 2)


@functools.cache
def reading():
    return mc.read_model(loss, PARAMS, X)


def labels(frozen):
    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "frozen" if any(x in name for x in frozen) else "trained"

    return jax.tree_util.tree_map_with_path(label, PARAMS)


def partition(tx, *frozen):
    parts = {"trained": tx, "frozen": optax.set_to_zero()}
    return optax.partition(parts, labels(frozen))


def test_clip_that_cannot_act_is_an_error_at_init():
    tx = partition(mc.muonclip(0.1, model=reading()), "gain")
    message = (
        "not given 'query/gain', 'key/gain', the only parameters that scale its "
        "logits, but trains 'key/kernel', 'query/kernel'"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.init, PARAMS)


def test_clip_outside_of_the_partition_acts():
    tx = optax.chain(
        partition(mc.muon(0.0, model=reading()), "gain"),
        mc.qk_clip(0.5, model=reading()),
    )
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    record = jax.jit(mc.record_attention(loss))
    _, stats = record(PARAMS, X)
    assert stats["max_logits"].min() > 0.6
    updates, state = tx.update(zeros, tx.init(PARAMS), PARAMS, attention_stats=stats)
    _, stats = record(optax.apply_updates(PARAMS, updates), X)
    assert stats["max_logits"].max() < 0.5 * (1 + 1e-5)
    assert mc.scalars(state, PARAMS, model=reading())["num_clipped"] > 0


def test_layer_that_is_frozen_as_a_whole_is_left_alone():
    tx = partition(mc.muonclip(0.1, model=reading()), "query", "key")
    assert not optax.tree.get(jax.eval_shape(tx.init, PARAMS), "gamma").size


def test_gains_that_the_loss_freezes_are_refused():
    def frozen(params, x):
        stopped = {
            name: {**params[name], "gain": jax.lax.stop_gradient(params[name]["gain"])}
            for name in ("query", "key")
        }
        return loss(params | stopped, x)

    found = mc.read_model(frozen, PARAMS, X)
    assert not found.attention
    assert "what makes it is frozen, so that no parameter scales" in found.refused[0]

"""Logits that nothing scales, as by norms or by frozen gains: recorded and logged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal, step_of

import muonclip_jax as mc


WATCH = float("inf")
X = normal(9, 2, 5, 8)
RTOL = 64 * np.finfo(np.float32).eps  # sums of at most 8 products, three in a row


def layer(seed):
    return {name: normal(seed + i, 8, 2, 4) for i, name in enumerate("qkv")}


PARAMS = {"first": layer(0), "last": layer(3)}


def logits_of(params, x, is_normalized):
    query, key = (jnp.einsum("btd,dhk->bthk", x, params[n]) for n in "qk")
    if is_normalized:
        query, key = (
            y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (query, key)
        )
    return 3 * jnp.einsum("bthk,bshk->bhts", query, key)


def attend(params, x, is_normalized=True):
    value = jnp.einsum("btd,dhk->bhtk", x, params["v"])
    weights = jax.nn.softmax(logits_of(params, x, is_normalized))
    return x + (weights @ value).swapaxes(1, 2).reshape(x.shape)


def loss(params, x):
    x = attend(params["first"], x)
    return jnp.mean(attend(params["last"], x) ** 2)


def mixed(params, x):
    x = attend(params["first"], x)
    return jnp.mean(attend(params["last"], x, is_normalized=False) ** 2)


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, p: (attend(p, x), None), x, params)
    return jnp.mean(x**2)


def expected(is_normalized):
    """The largest logit of each head of both layers, by hand."""
    x = attend(PARAMS["first"], X)
    first = logits_of(PARAMS["first"], X, True).max((0, 2, 3))
    return first, logits_of(PARAMS["last"], x, is_normalized).max((0, 2, 3))


@functools.cache
def recorded(fun, stack=False):
    params = (
        jax.tree.map(lambda *x: jnp.stack(x), *PARAMS.values()) if stack else PARAMS
    )
    reading = mc.read_model(fun, params, X)
    step = jax.value_and_grad(mc.record_attention(fun), has_aux=True)
    (_, stats), grads = jax.jit(step)(params, X)
    return params, reading, stats, grads


@pytest.mark.more
def test_they_are_recorded_and_logged_and_nothing_is_clipped():
    params, reading, stats, grads = recorded(loss)
    assert not reading.attention and len(reading.refused) == 2
    for name, own in zip(PARAMS, expected(True), strict=True):
        np.testing.assert_allclose(stats[name]["max_logits"], own, rtol=RTOL)
    tx = mc.muonclip(1e-3, model=reading, threshold=WATCH)
    updates, state = tx.update(grads, tx.init(params), params, attention_stats=stats)
    numbers = mc.scalars(state, params, model=reading, heads=True)
    assert numbers["num_clipped"] == 0 and numbers["clipped_fraction"] == 0
    first, last = expected(True)
    for name, own in (
        ("max_logit/first/head_1", first[1]),
        ("max_logit/last", max(last)),
    ):
        np.testing.assert_allclose(numbers[name], own, rtol=RTOL)
    alone, _ = mc.muon(1e-3, model=reading).update(
        grads, mc.muon(1e-3, model=reading).init(params), params
    )
    jax.tree.map(np.testing.assert_array_equal, updates, alone)


def test_layers_of_a_stack_have_a_number_each():
    _, reading, stats, _ = recorded(scanned, stack=True)
    assert not reading.attention
    np.testing.assert_allclose(stats["max_logits"], expected(True), rtol=RTOL)


def test_only_clipping_is_the_error():
    _, reading, *_ = recorded(loss)
    for threshold in (100.0, optax.constant_schedule(100.0)):
        with pytest.raises(ValueError, match="threshold=inf watches these"):
            mc.muonclip(1e-3, model=reading, threshold=threshold)
    with pytest.raises(ValueError, match="cannot scale the logits of\n  first"):
        mc.clip_qk(PARAMS, {}, 100.0, model=reading)


@pytest.mark.more
def test_next_to_layers_that_are_clipped():
    """Watched all together; or the others are clipped, and its statistic is let by."""
    params, reading, stats, grads = recorded(mixed)
    assert [x.path for x in reading.attention] == ["last"]
    first, last = expected(False)
    tx = mc.muonclip(1e-3, model=reading, threshold=WATCH)
    _, state = tx.update(grads, tx.init(params), params, attention_stats=stats)
    numbers = mc.scalars(state, params, model=reading)
    np.testing.assert_allclose(numbers["max_logit/first"], max(first), rtol=RTOL)
    np.testing.assert_allclose(numbers["max_logit/last"], max(last), rtol=RTOL)
    options = {"model": reading, "attention": reading.attention}
    clipped = mc.clip_qk(params, stats, 0.5, **options)
    jax.tree.map(np.testing.assert_array_equal, clipped["first"], params["first"])
    assert np.any(clipped["last"]["q"] != params["last"]["q"])


def test_over_micro_batches_the_largest_is_logged():
    params, reading, stats, grads = recorded(loss)
    clip = mc.muonclip(0.0, model=reading, threshold=WATCH)
    tx = mc.multi_steps(clip, 2, model=reading)
    state = tx.init(params)
    for factor in (2.0, 1.0):
        seen = jax.tree.map(lambda x, factor=factor: factor * x, stats)
        _, state = tx.update(grads, state, params, attention_stats=seen)
    largest = 2 * max(map(max, expected(True)))
    found = optax.tree.get(state, "max_logit")
    np.testing.assert_allclose(found, largest, rtol=RTOL)


def test_what_is_not_recorded_is_an_error_when_watched_too():
    def squared(params, x):
        q, k, v = (x @ params[n].reshape(8, 8) for n in "qkv")
        apart = ((q[:, :, None] - k[:, None]) ** 2).sum(-1)
        return jnp.mean((jax.nn.softmax(-apart) @ v) ** 2)

    reading = mc.read_model(squared, PARAMS["first"], X)
    assert reading.unrecorded == reading.refused != ()
    with pytest.raises(ValueError, match="are subtracted at .*test_watched.py"):
        mc.qk_clip(WATCH, model=reading)


def test_gains_that_a_mask_freezes_are_watched():
    """Clipping them is an error."""
    reading = reading_of_gains()
    _, stats = jax.jit(mc.record_attention(gained))(FROZEN, X)
    trained = {x: {"kernel": True, "gain": False} for x in ("query", "key")}
    trained["value"] = True
    with pytest.raises(ValueError, match="the only parameters that scale its logits"):
        optax.masked(mc.qk_clip(100.0, model=reading), trained).init(FROZEN)
    tx = optax.masked(mc.qk_clip(WATCH, model=reading), trained)
    _, state = tx.update(FROZEN, tx.init(FROZEN), FROZEN, attention_stats=stats)
    found = optax.tree.get(state, "max_logits")
    np.testing.assert_array_equal(found, stats["max_logits"])


FROZEN = {
    "query": {"kernel": normal(0, 8, 2, 4), "gain": jnp.ones(4)},
    "key": {"kernel": normal(1, 8, 2, 4), "gain": jnp.ones(4)},
    "value": normal(2, 8, 2, 4),
}


def gained(params, x):
    """Frozen gains: nothing scales logits that the kernels still make grow."""

    def normalized(side):
        y = jnp.einsum("btd,dhk->bthk", x, side["kernel"])
        return y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True)) * side["gain"]

    value = jnp.einsum("btd,dhk->bthk", x, params["value"])
    query, key = (normalized(params[name]) for name in ("query", "key"))
    return jnp.mean(jax.nn.dot_product_attention(query, key, value) ** 2)


@functools.cache
def reading_of_gains():
    return mc.read_model(gained, FROZEN, X)


def partition(tx, *frozen):
    """Leaves whose path has one of the words are frozen."""

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "frozen" if any(x in name for x in frozen) else "trained"

    parts = {"trained": tx, "frozen": optax.set_to_zero()}
    return optax.partition(parts, jax.tree_util.tree_map_with_path(label, FROZEN))


def test_clip_that_cannot_act_is_an_error_at_init():
    tx = partition(mc.muonclip(0.1, model=reading_of_gains()), "gain")
    message = (
        "not given 'query/gain', 'key/gain', the only parameters that scale its "
        "logits, but trains 'key/kernel', 'query/kernel'"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.init, FROZEN)


def test_clip_outside_of_the_partition_acts():
    reading = reading_of_gains()
    tx = optax.chain(
        partition(mc.muon(0.0, model=reading), "gain"), mc.qk_clip(0.5, model=reading)
    )
    zeros = jax.tree.map(jnp.zeros_like, FROZEN)
    record = jax.jit(mc.record_attention(gained))
    _, stats = record(FROZEN, X)
    assert stats["max_logits"].min() > 0.6
    state = tx.init(FROZEN)
    after, state = step_of(tx)(zeros, state, FROZEN, attention_stats=stats)
    _, stats = record(after, X)
    assert stats["max_logits"].max() < 0.5 * (1 + 1e-5)
    assert mc.scalars(state, FROZEN, model=reading)["num_clipped"] > 0


def test_layer_that_is_frozen_as_a_whole_is_left_alone():
    tx = partition(mc.muonclip(0.1, model=reading_of_gains()), "query", "key")
    assert not optax.tree.get(jax.eval_shape(tx.init, FROZEN), "gamma").size


def test_gains_that_the_loss_freezes_are_refused():
    def frozen(params, x):
        stopped = {
            name: {**params[name], "gain": jax.lax.stop_gradient(params[name]["gain"])}
            for name in ("query", "key")
        }
        return gained(params | stopped, x)

    found = mc.read_model(frozen, FROZEN, X)
    assert not found.attention
    assert "what makes it is frozen, so that no parameter scales" in found.refused[0]

"""Statistics over micro-batches, replicas and steps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


KERNEL = normal(0, 8, 2, 4)
PARAMS = {
    name: {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}} for name in "ab"
}
# One row per replica, or micro-batch.
ROWS = jnp.asarray([[50.0, 400.0], [200.0, 50.0]])
TWICE = jnp.asarray([[100.0, 800.0], [400.0, 100.0]])
STATS = {"a": {"max_logits": ROWS}, "b": {"max_logits": TWICE}}
COMBINED = {
    "a": {"max_logits": jnp.asarray([200.0, 400.0])},
    "b": {"max_logits": jnp.asarray([400.0, 800.0])},
}
ZEROS = jax.tree.map(lambda x: jnp.asarray(np.zeros_like(x)), PARAMS)


@functools.cache
def expected():
    return mc.clip_qk(PARAMS, COMBINED)


def row(i):
    return jax.tree.map(lambda s: s[i], STATS)


def clip(stats, **options):
    tx = mc.qk_clip(axis_name="data", **options)
    updates, state = tx.update(ZEROS, tx.init(PARAMS), PARAMS, attention_stats=stats)
    return optax.apply_updates(PARAMS, updates), optax.tree.get(state, "max_logit")


def test_multi_steps_with_running_statistics_clips_once_by_the_maximum():
    tx = optax.MultiSteps(mc.muonclip(0.0), 2)
    params, state, running = PARAMS, tx.init(PARAMS), row(0)
    for i in range(2):
        running = jax.tree.map(jnp.maximum, running, row(i))
        updates, state = tx.update(ZEROS, state, params, attention_stats=running)
        params = optax.apply_updates(params, updates)
        if i == 0:
            chex.assert_trees_all_equal(params, PARAMS)
    chex.assert_trees_all_close(params, expected(), rtol=1e-6)


def test_replicas_under_pmap():
    """torchtitan's two ranks: [50, 400] and [200, 50] give [200, 400] on both."""
    params, largest = jax.pmap(clip, axis_name="data")(STATS)
    for i in range(2):
        each = jax.tree.map(lambda p, i=i: p[i], params)
        chex.assert_trees_all_close(each, expected(), rtol=1e-6)
    np.testing.assert_array_equal(largest, 800)


def test_nan_on_one_replica_leaves_the_head_alone_on_all():
    stats = {"a": {"max_logits": ROWS.at[0, 0].set(jnp.nan)}, "b": STATS["b"]}
    params, _ = jax.pmap(clip, axis_name="data")(stats)
    for i in range(2):
        chex.assert_trees_all_equal(
            params["a"]["query"]["kernel"][i][:, 0], KERNEL[:, 0]
        )


def test_function_form_takes_the_axis_too():
    clipped = jax.vmap(
        lambda s: mc.clip_qk(PARAMS, s, axis_name="data"), axis_name="data"
    )(STATS)
    chex.assert_trees_all_close(
        jax.tree.map(lambda p: p[1], clipped), expected(), rtol=1e-6
    )


@pytest.mark.parametrize("jit", [False, True])
def test_threshold_and_alpha_as_schedules(jit):
    tx = mc.muonclip(
        0.0,
        threshold=lambda step: jnp.where(step < 2, 1000.0, 100.0),
        alpha=optax.linear_schedule(0.0, 1.0, 2),
    )
    step = jax.jit(tx.update) if jit else tx.update
    state, counts = tx.init(PARAMS), []
    for _ in range(3):
        updates, new_state = step(ZEROS, state, PARAMS, attention_stats=COMBINED)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        state = new_state
        counts.append(int(optax.tree.get(state, "num_clipped")))
    assert counts == [0, 0, 4]
    after = optax.apply_updates(PARAMS, updates)
    chex.assert_trees_all_close(
        after, mc.clip_qk(PARAMS, COMBINED, alpha=1.0), rtol=1e-6
    )


@pytest.mark.parametrize("stack", [(), (3,)])
def test_one_head_takes_no_statistics_of_several(stack):
    params = {
        "body": {
            name: {"kernel": jnp.ones((*stack, 8, 1, 4))} for name in ("query", "key")
        }
    }
    tx = mc.qk_clip()
    state = tx.init(params)

    def clip(shape):
        stats = {"body": {"max_logits": jnp.full(shape, 400.0)}}
        updates, _ = tx.update(params, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates)["body"]["query"]["kernel"]

    message = rf"'body/max_logits'.*\({', '.join(map(str, (*stack, 5)))},?\).*"
    with pytest.raises(ValueError, match=message + r"expected \((3, )?1,?\)"):
        clip((*stack, 5))
    # Weights of 1 and updates of 1, of which a fourth is left: half on each side.
    np.testing.assert_allclose(clip((*stack, 1)), 1.0, rtol=1e-6)
    if not stack:
        np.testing.assert_allclose(clip(()), 1.0, rtol=1e-6)


def test_one_head_of_a_reading_takes_no_statistics_of_several():
    def loss(params, x):
        query, key, value = (x @ params["attn"][name] for name in "qkv")
        return jnp.sum(jax.nn.softmax(query @ key.T) @ value)

    params = {"attn": {name: jnp.eye(4) for name in "qkv"}}
    x = jnp.eye(3, 4)
    reading = mc.read_model(loss, params, x)
    _, stats = mc.record_attention(loss)(params, x)
    np.testing.assert_allclose(stats["attn"]["max_logits"], [1.0])
    after = mc.clip_qk(params, stats, 0.25, model=reading)
    np.testing.assert_allclose(after["attn"]["q"], jnp.eye(4) / 2, rtol=1e-6)
    stats = {"attn": {"max_logits": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"'attn/max_logits'.*\(3,\).*\(1,\)"):
        mc.clip_qk(params, stats, 0.25, model=reading)

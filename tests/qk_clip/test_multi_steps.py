"""Micro-batches: one clip per real step, by the maximum of their statistics."""

import warnings

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import inputs, nnx_model, nnx_stats, randomize

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


KERNEL = randomize(jnp.ones((8, 2, 4)))
PARAMS = {
    name: {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}} for name in "ab"
}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


def stats(a, b):
    return {
        "a": {"max_logits": jnp.asarray(a)},
        "b": {"max_logits": (jnp.asarray(b),)},  # as a plain sow leaves it
    }


MICRO = [
    stats([50.0, 400.0], [90.0, 90.0]),
    stats([200.0, 50.0], [800.0, 90.0]),
    stats([90.0, 90.0], [90.0, 90.0]),
]
COMBINED = stats([200.0, 400.0], [800.0, 90.0])


def run(tx, micro_batches, grads=ZEROS):
    """Returns the params after every micro-batch, and the last state."""
    step, state, params, seen = jax.jit(tx.update), tx.init(PARAMS), PARAMS, []
    for each in micro_batches:
        updates, new_state = step(grads, state, params, attention_stats=each)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        params, state = optax.apply_updates(params, updates), new_state
        seen.append(params)
    return seen, state


def test_clips_once_per_real_step_by_the_maximum():
    seen, state = run(mc.multi_steps(mc.muonclip(0.0), 3), MICRO * 2)
    for i in (0, 1):
        chex.assert_trees_all_equal(seen[i], PARAMS)
    expected = mc.clip_qk(PARAMS, COMBINED)
    for i in (2, 3, 4):
        chex.assert_trees_all_close(seen[i], expected, rtol=1e-6)
    # The second real step starts its maximum afresh, with the same statistics.
    chex.assert_trees_all_close(seen[5], mc.clip_qk(expected, COMBINED), rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mc.scalars(state, PARAMS)["num_clipped"] == 3


def test_statistics_of_a_step_do_not_leak_into_the_next():
    calm = stats([90.0, 90.0], [90.0, 90.0])
    seen, state = run(mc.multi_steps(mc.muonclip(0.0), 2), [*MICRO[:2], calm, calm])
    chex.assert_trees_all_equal(seen[3], seen[1])
    assert mc.scalars(state, PARAMS)["max_logit"] == 90


def test_plain_multi_steps_sees_the_last_micro_batch_alone():
    """What the wrapper is for: a witness that these statistics tell the two apart."""
    seen, state = run(
        optax.MultiSteps(mc.muonclip(0.0), 3).gradient_transformation(), MICRO
    )
    chex.assert_trees_all_equal(seen[2], PARAMS)
    with pytest.warns(UserWarning, match="last micro-batch alone.*mc.multi_steps"):
        mc.scalars(state, PARAMS)


def test_equals_optax_where_nothing_is_clipped():
    calm = stats([9.0, 9.0], [9.0, 9.0])
    grads = randomize(PARAMS, 3)
    ours, _ = run(mc.multi_steps(mc.muonclip(0.1), 2), [calm] * 4, grads)
    theirs = optax.MultiSteps(mc.muonclip(0.1), 2).gradient_transformation()
    expected, _ = run(theirs, [calm] * 4, grads)
    chex.assert_trees_all_close(ours[-1], expected[-1], rtol=1e-6)


def test_a_schedule_of_one_clips_at_every_step():
    seen, _ = run(mc.multi_steps(mc.muonclip(0.0), 1), MICRO[:2])
    once = mc.clip_qk(PARAMS, MICRO[0])
    chex.assert_trees_all_close(seen[0], once, rtol=1e-6)
    chex.assert_trees_all_close(seen[1], mc.clip_qk(once, MICRO[1]), rtol=1e-6)


def test_a_rejected_micro_batch_does_not_count():
    tx = mc.multi_steps(
        mc.muonclip(0.0), 2, should_skip_update_fn=optax.skip_not_finite
    )
    state, params = tx.init(PARAMS), PARAMS
    broken = jax.tree.map(lambda g: g * jnp.nan, jax.tree.map(jnp.ones_like, PARAMS))
    update = jax.jit(tx.update)
    for grads, each in ((broken, MICRO[0]), (ZEROS, MICRO[1]), (ZEROS, MICRO[2])):
        updates, state = update(grads, state, params, attention_stats=each)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(params, mc.clip_qk(PARAMS, MICRO[1]), rtol=1e-6)


def test_a_step_that_apply_if_finite_rejects_clips_nothing():
    tx = optax.apply_if_finite(mc.muonclip(0.1), 5)
    state = tx.init(PARAMS)
    broken = jax.tree.map(lambda g: g * jnp.nan, jax.tree.map(jnp.ones_like, PARAMS))
    updates, state = tx.update(broken, state, PARAMS, attention_stats=COMBINED)
    chex.assert_trees_all_equal(optax.apply_updates(PARAMS, updates), PARAMS)
    assert mc.scalars(state, PARAMS)["num_clipped"] == 0


def test_missing_statistics_of_any_micro_batch_are_an_error():
    tx = mc.multi_steps(mc.muonclip(0.0), 2)
    with pytest.raises(ValueError, match="needs attention_stats"):
        tx.update(ZEROS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="no statistics.*'b'"):
        partial = {"a": MICRO[0]["a"]}
        tx.update(ZEROS, tx.init(PARAMS), PARAMS, attention_stats=partial)
    with pytest.raises(ValueError, match="needs the params"):
        tx.update(ZEROS, tx.init(PARAMS), attention_stats=MICRO[0])


def test_a_model_without_attention():
    params = {"w": jnp.ones((2, 2))}
    tx = mc.multi_steps(mc.muonclip(0.1), 2)
    updates, state = tx.update(params, tx.init(params), params, attention_stats={})
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
    assert state.running.shape == (0,)


def test_in_an_nnx_optimizer():
    model = nnx_model()
    optimizer = nnx.Optimizer(
        model, mc.multi_steps(mc.muonclip(0.0, threshold=1e-3), 2), wrt=nnx.Param
    )
    before = nnx.to_pure_dict(nnx.state(model))

    @nnx.jit
    def step(model, optimizer):
        stats = nnx_stats(model, inputs())
        grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads, attention_stats=stats)

    moved = []
    for _ in range(2):
        step(model, optimizer)
        after = nnx.to_pure_dict(nnx.state(model))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
        moved.append(not all(jax.tree.leaves(same)))
    assert moved == [False, True]
    metrics = mc.scalars(optimizer.opt_state, nnx.state(model, nnx.Param))
    assert metrics["ever_clipped_fraction"] > 0

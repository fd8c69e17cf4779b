"""Statistics over micro-batches, replicas and steps; replicas keep one state."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of, more, normal, query_and_key, step_of
from jax.sharding import PartitionSpec as P

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
    params = {"body": query_and_key(*stack, 8, 1, 4)}
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


ONES = {"a": query_and_key(8, 2, 4)}
# The last replica has the largest logit of one head, the first that of the other.
LARGE = np.stack([np.arange(8), 7.5 - np.arange(8)], 1).astype(np.float32) * 100
SMALL = np.zeros((8, 2), np.float32)

WAYS = {
    "the clip's axis": lambda: mc.multi_steps(mc.muonclip(0.0, axis_name="x"), 2),
    "its own": lambda: mc.multi_steps(mc.muonclip(0.0), 2, axis_name="x"),
    "both": lambda: mc.multi_steps(
        optax.chain(optax.sgd(0.0), mc.qk_clip(axis_name="x")), 2, axis_name="x"
    ),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_maximum_survives_a_checkpoint_between_micro_batches(way, check):
    mesh = mesh_of(x=8)
    tx = WAYS[way]()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=check
    )
    def step(state, logits):
        stats = {"a": {"max_logits": logits[0]}}
        return tx.update(ONES, state, ONES, attention_stats=stats)

    _, state = step(tx.init(ONES), LARGE)
    assert state.running.tolist() == [700.0, 750.0]
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    updates, state = step(restored, SMALL)
    assert float(optax.tree.get(state, "max_logit")) == 750
    weights = optax.apply_updates(ONES, updates)["a"]["query"]["kernel"]
    expected = np.sqrt(100 / np.array([700.0, 750.0]))
    np.testing.assert_allclose(weights[0, :, 0], expected, rtol=1e-6)


# Gradients

MODEL = {
    "attn": {
        "query": {"kernel": normal(0, 6, 3, 4)},
        "key": {"kernel": normal(1, 6, 3, 4)},
        "out": {"kernel": normal(2, 3, 4, 6)},
    },
    "norm": {"scale": normal(3, 6)},
}
REPLICAS = 4
OPTIONS = {"orthogonalizer": mc.NewtonSchulz(steps=2), "weight_decay": 0.0}

OPTIMIZERS = {
    "its own axis": lambda axis: (mc.muonclip(0.1, axis_name=axis, **OPTIONS), None),
    "told the axis": lambda axis: (mc.muonclip(0.1, **OPTIONS), axis),
    "in a chain": lambda axis: (
        optax.chain(
            optax.clip(100.0),
            mc.muon(0.1, axis_name=axis, **OPTIONS),
            mc.qk_clip(axis_name=axis),
        ),
        axis,
    ),
}


def gradients_at(step):
    """Of each replica, in front."""
    return jax.tree.map(lambda x: normal((step, x.size), REPLICAS, *x.shape), MODEL)


def statistics_at(step):
    rows = 60.0 * np.arange(3 * REPLICAS, dtype=np.float32).reshape(REPLICAS, 3)
    return {"attn": {"max_logits": rows[:: 1 - 2 * (step % 2)] / (step + 1)}}


def step_with_stats(tx):
    """A step whose statistics are a positional argument, as `pmap` maps them."""

    def step(grads, state, params, stats):
        return step_of(tx)(grads, state, params, attention_stats=stats)

    return step


def in_shard_map(tx, check):
    mesh = mesh_of(x=REPLICAS)

    def step(grads, state, params, stats):
        grads, stats = jax.tree.map(lambda x: x[0], (grads, stats))
        return step_with_stats(tx)(grads, state, params, stats)

    specs = P("x"), P(), P(), P("x")
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
    )


def in_pmap(tx):
    step = jax.pmap(step_with_stats(tx), axis_name="x", in_axes=(0, None, None, 0))

    def first(*arguments):
        results = step(*arguments)
        for x in jax.tree.leaves(results):
            np.testing.assert_array_equal(x, np.stack([x[0]] * REPLICAS))
        # A checkpoint keeps what one replica has.
        return jax.tree.map(lambda x: jnp.asarray(x[0]), results)

    return first


MAPS = {
    "pmap": in_pmap,
    "shard_map": lambda tx: in_shard_map(tx, True),
    "shard_map unchecked": lambda tx: in_shard_map(tx, False),
}


def walk(step, state, gradients):
    params = MODEL
    for i, grads in enumerate(gradients):
        params, state = step(grads, state, params, statistics_at(i))
        # Through a checkpoint, which keeps what the first device has.
        params, state = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x.addressable_shards[0].data)),
            (params, state),
        )
    return params, state


def by_one_device(gradients):
    tx = mc.multi_steps(mc.muonclip(0.1, **OPTIONS), 2)

    def step(grads, state, params, stats):
        grads = jax.tree.map(lambda x: x.mean(0), grads)
        stats = jax.tree.map(lambda x: x.max(0), stats)
        return step_with_stats(tx)(grads, state, params, stats)

    return walk(step, tx.init(MODEL), gradients)


@pytest.mark.parametrize(
    ("name", "map_"),
    [
        more("its own axis", "pmap"),
        more("told the axis", "shard_map"),
        ("in a chain", "shard_map unchecked"),
    ],
)
def test_gradients_are_averaged_before_they_are_accumulated(name, map_):
    opt, axis = OPTIMIZERS[name]("x")
    tx = mc.multi_steps(opt, 2, axis_name=axis)
    gradients = [gradients_at(i) for i in range(3)]
    params, state = walk(MAPS[map_](tx), tx.init(MODEL), gradients)
    expected, desired = by_one_device(gradients)
    chex.assert_trees_all_close(params, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.running, desired.running)
    accumulated = (state.acc_grads, desired.acc_grads)
    chex.assert_trees_all_close(*accumulated, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("map_", [more("pmap"), "shard_map"])
def test_all_replicas_skip_what_is_not_finite_on_one(map_):
    """Where each decided for itself, some would wait for others forever."""
    skip = {"should_skip_update_fn": optax.skip_not_finite}
    tx = mc.multi_steps(mc.muonclip(0.1, axis_name="x", **OPTIONS), 2, **skip)

    gradients = [gradients_at(i) for i in range(3)]
    scale = gradients[1]["norm"]["scale"]
    gradients[1]["norm"]["scale"] = scale.at[1, 2].set(jnp.nan)
    _, state = walk(MAPS[map_](tx), tx.init(MODEL), gradients)
    assert int(state.gradient_step) == 1 and int(state.mini_step) == 0


def test_an_axis_of_an_optimizer_in_a_chain():
    opt, _ = OPTIMIZERS["in a chain"]("x")
    tx = mc.multi_steps(opt, 2)
    message = r"inside multi_steps has axis_name=\['x'\].*mc.multi_steps\(tx, every_k"
    with pytest.raises(ValueError, match=message):
        in_shard_map(tx, False)(
            gradients_at(0), tx.init(MODEL), MODEL, statistics_at(0)
        )

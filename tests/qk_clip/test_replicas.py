"""Replicas in `shard_map` and `pmap` that accumulate micro-batches keep one state."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import more, normal
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

KERNEL = np.ones((8, 2, 4), np.float32)
PARAMS = {"a": {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}}}
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
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = WAYS[way]()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=check
    )
    def step(state, logits):
        stats = {"a": {"max_logits": logits[0]}}
        return tx.update(PARAMS, state, PARAMS, attention_stats=stats)

    _, state = step(tx.init(PARAMS), LARGE)
    assert state.running.tolist() == [700.0, 750.0]
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    updates, state = step(restored, SMALL)
    assert float(optax.tree.get(state, "max_logit")) == 750
    weights = optax.apply_updates(PARAMS, updates)["a"]["query"]["kernel"]
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


def step_of(tx):
    def step(grads, state, params, stats):
        updates, state = tx.update(grads, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state

    return step


def in_shard_map(tx, check):
    mesh = jax.make_mesh((REPLICAS,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(grads, state, params, stats):
        grads, stats = jax.tree.map(lambda x: x[0], (grads, stats))
        return step_of(tx)(grads, state, params, stats)

    specs = P("x"), P(), P(), P("x")
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
    )


def in_pmap(tx):
    step = jax.pmap(step_of(tx), axis_name="x", in_axes=(0, None, None, 0))

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
        return step_of(tx)(grads, state, params, stats)

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

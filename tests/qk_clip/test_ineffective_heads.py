"""Heads that clips do nothing for are found by that, reported and left alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


WIDTH, HEADS, HEAD_DIM = 8, 4, 6
X = normal(0, 32, WIDTH)


def make_params(scale=3.0):
    layer = {
        name: {
            "kernel": normal((i, 1), WIDTH, HEADS, HEAD_DIM, scale=scale),
            "bias": normal((i, 2), HEADS, HEAD_DIM, scale=scale),
        }
        for i, name in enumerate(("query", "key"))
    }
    return {"attn": layer, "mlp": {"kernel": normal(3, WIDTH, WIDTH)}}


def measure(params, *, normalised=()):
    """The largest logits; those of some heads from unit vectors, times 20."""

    def project(name):
        leaves = params["attn"][name]
        y = jnp.einsum("td,dhk->thk", X, leaves["kernel"]) + leaves["bias"]
        unit = 20 * y / jnp.linalg.norm(y, axis=-1, keepdims=True)
        return jnp.where(np.isin(np.arange(HEADS), list(normalised))[:, None], unit, y)

    logits = jnp.einsum("qhk,thk->hqt", project("query"), project("key"))
    return {"attn": {"max_logits": logits.max((1, 2))}}


def train(tx, params, steps, **options):
    """What a step does, and the norm of each query head after each of them."""

    @jax.jit
    def step(params, state):
        stats = measure(params, **options)
        grads = jax.tree.map(lambda p: 0.05 * p, params)
        updates, state = tx.update(grads, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state

    state, norms = tx.init(params), []
    for _ in range(steps):
        params, state = step(params, state)
        query = np.asarray(params["attn"]["query"]["kernel"])
        norms.append(np.linalg.norm(query, axis=(0, 2)))
    return params, state, np.array(norms)


@pytest.mark.parametrize("threshold", [1.0, 50.0, 250.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_found_by_the_logits_that_stay(threshold, alpha):
    tx = optax.chain(optax.sgd(0.0), mc.qk_clip(threshold, alpha=alpha))
    params = make_params()
    after, state, _ = train(tx, params, 40, normalised=(0, 2))
    layer = mc.qk_clip_metrics(state, params)["layers"]["attn"]
    assert layer["max_logits"][0] > threshold
    np.testing.assert_array_equal(layer["ineffective"], [True, False, True, False])
    np.testing.assert_array_equal(layer["gamma"], np.ones(HEADS))
    assert mc.qk_clip_metrics(state, params)["ineffective_heads"] == 2
    # What shrank is what the documentation says, and the rest was clipped as ever.
    fell = {
        name: jnp.linalg.norm(after["attn"][name]["kernel"], axis=(0, 2))
        / jnp.linalg.norm(params["attn"][name]["kernel"], axis=(0, 2))
        for name in ("query", "key")
    }
    product = np.asarray(fell["query"] * fell["key"])
    assert (
        product[[0, 2]] > 3e-6 if threshold == 1 else product[[0, 2]] > 1 / 70
    ).all()
    bounded = np.asarray(measure(after)["attn"]["max_logits"])[[1, 3]]
    assert (bounded <= threshold * 1.001).all()


def test_left_alone_bit_for_bit_from_then_on():
    params = make_params()
    tx = optax.chain(optax.sgd(0.0), mc.qk_clip(50.0))
    some, _, _ = train(tx, params, 10, normalised=range(HEADS))
    more, state, _ = train(tx, params, 40, normalised=range(HEADS))
    np.testing.assert_array_equal(
        some["attn"]["query"]["kernel"], more["attn"]["query"]["kernel"]
    )
    assert optax.tree.get(state, "num_clipped") == 0


@pytest.mark.parametrize("growth", [1.001, 1.05, 1.5])
def test_not_those_that_grow_back(growth):
    """They are clipped at every step, a thousandfold in all, and stay as large."""
    rate = (growth - 1) / 0.05
    tx = optax.chain(optax.sgd(-rate), mc.qk_clip(30.0))
    params = make_params()
    _, state, norms = train(tx, params, 400)
    metrics = mc.qk_clip_metrics(state, params)
    assert metrics["ineffective_heads"] == 0
    assert metrics["num_clipped"] == HEADS
    assert (np.abs(np.log(norms[-1] / norms[50])) < 0.1).all()


def test_not_those_whose_logits_jump():
    """Batches differ by a factor of ten, at learning rate zero."""
    params = make_params()
    rng = np.random.default_rng(0)
    tx = optax.chain(optax.sgd(0.0), mc.qk_clip(30.0))
    state, step = tx.init(params), jax.jit(tx.update)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for _ in range(200):
        factor = 10 ** rng.uniform(0, 1, HEADS).astype(np.float32)
        stats = {"attn": {"max_logits": measure(params)["attn"]["max_logits"] * factor}}
        updates, state = step(zeros, state, params, attention_stats=stats)
        params = optax.apply_updates(params, updates)
    assert not state[1].record.ineffective.any()
    assert (state[1].last_clip >= 0).all()


def test_devices_that_hold_parts_agree():
    """Each sees other rows of the weights; the state is the same on all of them."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=automatic)
    params = make_params()
    rows = jax.tree.map(lambda p: P("rows") if p.shape[0] == WIDTH else P(), params)
    tx = optax.chain(optax.sgd(0.0), mc.qk_clip(50.0))
    state = tx.init(params)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, P(), P()), out_specs=(rows, P())
    )
    def step(params, state, stats):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(zeros, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state

    expected, alone, _ = train(tx, params, 12, normalised=(1,))
    for _ in range(12):
        params, state = step(params, state, measure(params, normalised=(1,)))
    np.testing.assert_array_equal(
        optax.tree.get(state, "record").ineffective, [False, True, False, False]
    )
    np.testing.assert_allclose(
        params["attn"]["key"]["kernel"], expected["attn"]["key"]["kernel"], rtol=1e-5
    )
    np.testing.assert_array_equal(
        optax.tree.get(alone, "record").ineffective,
        optax.tree.get(state, "record").ineffective,
    )


LEAVES = {
    "Flax": (mc.HeadLeaf("x", 3), (5, 4, 6)),
    "bias": (mc.HeadLeaf("x", 2), (4, 6)),
    "heads first, stacked": (mc.HeadLeaf("x", 3, axis=-3), (2, 4, 5, 6)),
    "flat": (mc.HeadLeaf("x", 2, split=(4, -1)), (5, 24)),
    "keys of a fused kernel": (
        mc.HeadLeaf("x", 2, split=(3, 4, 6), part=(-3, slice(1, 2))),
        (2, 5, 72),
    ),
    "head by head": (
        mc.HeadLeaf("x", 2, split=(4, 3, 6), part=(-2, slice(0, 1))),
        (5, 72),
    ),
    "part of a head": (
        mc.HeadLeaf("x", 2, split=(4, 10), part=(-1, slice(6, 10)), stack_axis=1),
        (5, 3, 40),
    ),
    "part of another axis": (mc.HeadLeaf("x", 3, part=(-1, slice(2, 4))), (5, 4, 6)),
    "heads beside a split axis": (mc.HeadLeaf("x", 2, axis=-3, split=(2, 3)), (4, 6)),
    "shared gain": (mc.HeadLeaf("x", 1, axis=None), (3, 6)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_the_sum_of_a_head_is_over_what_its_scale_multiplies(name):
    """Derivative of `sum(scale * x)` by the factor of each head."""
    leaf, shape = LEAVES[name]
    x = normal(1, *shape)
    factors = jnp.ones((*leaf.stack(shape), leaf.heads(shape)))
    expected = jax.grad(lambda f: (leaf.scale(shape, f) * x).sum())(factors)
    np.testing.assert_allclose(leaf.sum(x), expected, rtol=1e-5)
